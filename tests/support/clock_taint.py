"""Times in a test's source: names, attributes and helper functions that hold a clock's reading.

Used by `clock_lint`. A name is followed through assignments, arithmetic, containers and helpers of its module, to a
fixed point. Other modules are not followed. Knows no rules about times in tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "thread_time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
DATES = {"now", "utcnow", "today"}  # of datetime and date
TRANSPARENT = {"abs", "float", "int", "list", "max", "min", "reversed", "round", "set"}
TRANSPARENT |= {"sorted", "sum", "tuple", "mean", "median"}
METHODS = {"total_seconds", "timestamp", "pop", "copy"}  # of a time, or of a list of times
ADDERS = {"append", "add", "extend", "insert", "put", "put_nowait"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
MOMENT, ELAPSED, UPPER, LOWER, OTHER = "moment", "elapsed", "upper", "lower", "other"


@dataclass(frozen=True, slots=True)
class Time:
    """A value that depends on a clock. `elapsed` only grows on a slow machine, and `lower` becomes true on one."""

    kind: str  # moment, elapsed, other; of booleans: lower, upper
    line: int = 0  # of the reading, for a moment


Found = Time | tuple["Found", ...] | None


def flat(found: Found) -> Time | None:
    """Return one time for all elements."""
    if not isinstance(found, tuple):
        return found
    kinds = {time.kind for time in map(flat, found) if time is not None}
    if not kinds:
        return None
    return Time(ELAPSED if kinds == {ELAPSED} else OTHER)


def merged(one: Found, other: Found) -> Found:
    """Return the time of a name that is assigned twice. The last of several moments counts."""
    if one is None or other is None or one == other:
        return one or other
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(merged, one, other))
    first, second = flat(one), flat(other)
    if first is None or second is None or first.kind == second.kind == ELAPSED:
        return first or second
    if first.kind == second.kind:
        return max(first, second, key=lambda time: time.line)
    return Time(OTHER)


def name_of(node: ast.AST) -> str:
    """Return the last name of `a`, `b.a`, `a[0]` and `a()`, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return name_of(node.func) if isinstance(node, ast.Call) else ""


def is_clock_read(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = name_of(node.func)
    if name in DATES and isinstance(node.func, ast.Attribute):
        return name_of(node.func.value) in ("datetime", "date")
    return name in CLOCKS and not node.args and not node.keywords


@dataclass(slots=True)
class Module:
    """The times that the functions of one module share: attributes and what helpers return."""

    attributes: dict[str, Found] = field(default_factory=dict)
    helpers: dict[str, Found] = field(default_factory=dict)


@dataclass(slots=True)
class Scope:
    """The times of one function, nested functions included."""

    module: Module
    names: dict[str, Found] = field(default_factory=dict)

    def find(self, node: ast.AST | None) -> Found:
        """Return the time that an expression has as its value."""
        match node:
            case ast.Call():
                return self._call(node)
            case ast.Name():
                return self.names.get(node.id)
            case ast.Attribute():
                return self.module.attributes.get(node.attr)
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.Compare():
                return self._comparison(node)
            case ast.UnaryOp():
                return self._negated(node)
            case ast.Subscript():
                return self._element(node)
            case ast.IfExp():
                return merged(self.find(node.body), self.find(node.orelse))
            case ast.Await() | ast.NamedExpr() | ast.Starred():
                return self.find(node.value)
        return self._container(node)

    def _container(self, node: ast.AST | None) -> Found:
        match node:
            case ast.Tuple() | ast.List() | ast.Set():
                return tuple(self.find(each) for each in node.elts)
            case ast.Dict() | ast.BoolOp():
                return flat(tuple(self.find(each) for each in node.values))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return flat(self.find(node.elt))
            case ast.DictComp():
                return flat(self.find(node.value))
        return None

    def _call(self, node: ast.Call) -> Found:
        if is_clock_read(node):
            return Time(MOMENT, node.lineno)
        name = name_of(node.func)
        if name in self.module.helpers:
            return self.module.helpers[name]
        if name in METHODS and isinstance(node.func, ast.Attribute):
            return flat(self.find(node.func.value))
        if name not in TRANSPARENT:
            return None
        found = tuple(self.find(each) for each in node.args)
        return found[0] if len(found) == 1 and isinstance(found[0], Time) else flat(found)

    def _arithmetic(self, node: ast.BinOp) -> Found:
        left, right = flat(self.find(node.left)), flat(self.find(node.right))
        if left is None and right is None:
            return None
        moments = [time for time in (left, right) if time is not None and time.kind == MOMENT]
        if isinstance(node.op, ast.Sub) and len(moments) == 2:
            is_in_order = moments[0].line >= moments[1].line
            return Time(ELAPSED if is_in_order else OTHER)
        grows = left is not None and left.kind == ELAPSED and (right is None or right == left)
        if grows and (right is None or isinstance(node.op, ast.Add)):
            return Time(ELAPSED)
        added = left is None and right is not None and right.kind == ELAPSED
        return Time(ELAPSED if added and isinstance(node.op, ast.Add | ast.Mult) else OTHER)

    def _comparison(self, node: ast.Compare) -> Found:
        parts = (node.left, *node.comparators)
        times = [flat(self.find(part)) for part in parts]
        if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops) or not any(times):
            return None
        bounds = {
            bound(left, op, right)
            for left, op, right in zip(times, node.ops, times[1:], strict=False)
            if left or right
        }
        return Time(bounds.pop() if len(bounds) == 1 else OTHER)

    def _negated(self, node: ast.UnaryOp) -> Found:
        found = flat(self.find(node.operand))
        if found is None:
            return None
        if isinstance(node.op, ast.Not):
            return {UPPER: Time(LOWER), LOWER: Time(UPPER)}.get(found.kind)
        return found if isinstance(node.op, ast.UAdd) else Time(OTHER)

    def _element(self, node: ast.Subscript) -> Found:
        found = self.find(node.value)
        index = node.slice
        if isinstance(found, tuple) and isinstance(index, ast.Constant):
            if isinstance(index.value, int) and index.value < len(found):
                return found[index.value]
            return flat(found)
        return flat(found)

    def learn(self, function: ast.AST) -> None:
        """Record the times that the statements of a function give to names and attributes."""
        for target, found in self._assigned(function):
            self._assign(target, found)
        for node in ast.walk(function):
            if isinstance(node, Function) and node is not function:
                self.module.helpers.update(self._returned(node))

    def _assigned(self, function: ast.AST) -> Iterator[tuple[ast.AST, Found]]:
        for node in ast.walk(function):
            match node:
                case ast.Assign():
                    yield from ((target, self.find(node.value)) for target in node.targets)
                case ast.AnnAssign() | ast.NamedExpr():
                    yield node.target, self.find(node.value)
                case ast.AugAssign():
                    yield node.target, flat(self.find(node.value))
                case ast.For() | ast.AsyncFor() | ast.comprehension():
                    yield node.target, one_element(self.find(node.iter))
                case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in ADDERS:
                    yield from ((value, flat(self.find(each))) for each in node.args)

    def _assign(self, target: ast.AST, found: Found) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(found, tuple) and len(found) == len(target.elts)
            parts = found if same else (flat(found),) * len(target.elts)
            for each, part in zip(
                target.elts, parts if isinstance(parts, tuple) else (), strict=True
            ):
                self._assign(each, part)
        elif found is not None and flat(found) is not None:
            held = self.names if isinstance(target, ast.Name) else self.module.attributes
            if isinstance(target, ast.Subscript | ast.Starred):
                self._assign(target.value, flat(found))
            elif isinstance(target, ast.Name | ast.Attribute):
                held[name_of(target)] = merged(held.get(name_of(target)), found)

    def _returned(self, function: Function) -> dict[str, Found]:
        """Return the name of a helper with the time that it returns, or nothing."""
        nested = {
            node
            for inner in ast.walk(function)
            if isinstance(inner, Function | ast.Lambda) and inner is not function
            for node in ast.walk(inner)
        }
        found: Found = None
        for node in ast.walk(function):
            if isinstance(node, ast.Return | ast.Yield) and node not in nested:
                found = merged(found, self.find(node.value))
        return {} if found is None or flat(found) is None else {function.name: found}

    def learn_helper(self, function: Function) -> None:
        self.module.helpers.update(self._returned(function))


def bound(left: Time | None, op: ast.cmpop, right: Time | None) -> str:
    """Return `lower` for `elapsed >= 5`, which a slow machine only makes true, and `upper` for `elapsed < 5`."""
    if right is None and left is not None and left.kind == ELAPSED:
        is_lower, is_upper = isinstance(op, ast.Gt | ast.GtE), isinstance(op, ast.Lt | ast.LtE)
    elif left is None and right is not None and right.kind == ELAPSED:
        is_lower, is_upper = isinstance(op, ast.Lt | ast.LtE), isinstance(op, ast.Gt | ast.GtE)
    else:
        return OTHER
    return LOWER if is_lower else UPPER if is_upper else OTHER


def one_element(found: Found) -> Found:
    """Return the time of each element of a loop's iterable."""
    if isinstance(found, tuple) and all(each == found[0] for each in found):
        return found[0] if found else None
    return flat(found)


def find_scopes(tree: ast.Module) -> dict[Function, Scope]:
    """Return the times of every function of a module, to a fixed point."""
    module = Module()
    scopes = {node: Scope(module) for node in ast.walk(tree) if isinstance(node, Function)}
    while True:
        before = repr((module, [scope.names for scope in scopes.values()]))
        for function, scope in scopes.items():
            scope.learn(function)
            scope.learn_helper(function)
        if repr((module, [scope.names for scope in scopes.values()])) == before:
            return scopes
