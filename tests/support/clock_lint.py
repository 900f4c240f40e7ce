"""Finds assertions of the fast tier that depend on a clock, and waits whose limit is too short for a busy machine.

Used by `test_no_clock_asserts`. An assertion is an `assert`, and a `pytest.fail` or `raise AssertionError` under a
condition. Lower bounds such as `elapsed >= 1` are allowed, as a slow machine cannot break them. Reads sources only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from support.clock_taint import (
    LOWER,
    UPPER,
    Function,
    Scope,
    find_scopes,
    flat,
    is_clock_read,
    name_of,
)

SHORTEST = 60.0  # seconds that any operation may take on a busy machine
FAILURES = {"AssertionError", "TimeoutError", "Failed"}
WAITS = {"wait_for": 1, "timeout": 0, "wait": 0, "join": 0, "eventually": 2}  # place of the limit
KEYWORDS = {"timeout", "seconds", "within"}
EXPECTED = {"raises", "suppress"}
SLEEPERS = {"Event", "Condition"}  # their `wait` returns False at its limit
CLIENTS = ("Client", "Connection")
TIMES = re.compile(r"monotonic|perf_counter|_time\b|\btime\b|now\(|today\(")
LIMITS = re.compile("|".join((*WAITS, *KEYWORDS)))


def find_clock_asserts(source: str) -> list[int]:
    """Return the lines of assertions that a slow machine can break."""
    if not TIMES.search(source):
        return []
    tree = ast.parse(source)
    scopes = find_scopes(tree)
    return sorted({line for each in fast_functions(tree) for line in _asserts(each, scopes[each])})


def find_short_limits(source: str) -> list[int]:
    """Return the lines of waits that fail after a literal or constant limit below `SHORTEST`."""
    if not LIMITS.search(source):
        return []
    tree = ast.parse(source)
    constants, sleepers = _constants(tree), _sleepers(tree)
    return sorted(
        {
            call.lineno
            for function in fast_functions(tree)
            for call in _failing_calls(function, sleepers)
            for limit in _limits(call, constants)
            if limit < SHORTEST
        }
    )


def fast_functions(tree: ast.Module) -> list[Function]:
    """Return the functions that are not marked `full` or `soak`, alone or with their class or module."""
    if any(isinstance(node, ast.Assign) and _is_slow_mark(node.value) for node in tree.body):
        return []
    slow = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, Function | ast.ClassDef)
        and any(map(_is_slow_mark, node.decorator_list))
        for inner in ast.walk(node)
    }
    return [node for node in ast.walk(tree) if isinstance(node, Function) and node not in slow]


def _is_slow_mark(node: ast.AST) -> bool:
    """Return True for `pytest.mark.full` and lists with it, not for a marked parameter."""
    if isinstance(node, ast.List | ast.Tuple):
        return any(map(_is_slow_mark, node.elts))
    return isinstance(node, ast.Attribute) and node.attr in ("full", "soak")


def _asserts(function: Function, scope: Scope) -> Iterator[int]:
    for node, test, wanted in (*_conditions(function), *_expired_loops(function)):
        if not _is_safe(test, scope, wanted):
            yield node.lineno


def _conditions(function: Function) -> Iterator[tuple[ast.stmt, ast.expr, bool]]:
    """Yield each statement that can fail the test, its condition, and the value of the condition that passes."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            yield node, node.test, True
        if isinstance(node, ast.If) and _fails(node.body):
            yield node, node.test, False
        if isinstance(node, ast.If | ast.While) and _fails(node.orelse):
            yield node, node.test, True


def _expired_loops(function: Function) -> Iterator[tuple[ast.stmt, ast.expr, bool]]:
    """Yield the loops `while time.monotonic() < end` with a failure after them."""
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                for loop, after in pairwise(block):
                    if isinstance(loop, ast.While) and _ends_the_test(after):
                        yield loop, loop.test, True


def _fails(block: Iterable[ast.stmt]) -> bool:
    """Return True if a statement ends the test, at the top or inside other statements."""
    return any(
        _ends_the_test(statement)
        or (isinstance(statement, ast.With | ast.Try | ast.If | ast.For) and _fails(statement.body))
        for statement in block
    )


def _ends_the_test(statement: ast.stmt) -> bool:
    """Return True for `raise AssertionError`, `pytest.fail()` and `assert False`."""
    match statement:
        case ast.Raise(exc=ast.expr() as error):
            return name_of(error) in FAILURES
        case ast.Expr(value=ast.Call(func=called)):
            return ast.unparse(called) in ("fail", "pytest.fail")
        case ast.Assert(test=ast.Constant()):
            return True
    return False


def _is_safe(test: ast.AST, scope: Scope, wanted: bool) -> bool:
    """Return True if a slow machine cannot keep `test` from being `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_safe(test.operand, scope, not wanted)
    if isinstance(test, ast.BoolOp):
        return all(_is_safe(each, scope, wanted) for each in test.values)
    if isinstance(test, ast.NamedExpr):
        return _is_safe(test.value, scope, wanted)
    if isinstance(test, ast.Call) and name_of(test.func) in ("all", "any", "bool"):
        return all(_is_safe(each, scope, wanted) for each in test.args)
    if isinstance(test, ast.GeneratorExp | ast.ListComp):
        return _is_safe(test.elt, scope, wanted)
    found = flat(scope.find(test))
    if found is not None and found.kind in (LOWER, UPPER):
        return found.kind == (LOWER if wanted else UPPER)
    compares = isinstance(test, ast.Compare) and found is not None
    return not compares and not _reads(test, scope)


def _reads(node: ast.AST, scope: Scope) -> bool:
    """Return True if a part of an expression reads a clock or compares times."""
    parts = [each for each in ast.walk(node) if each is not node]
    return any(
        is_clock_read(each) or (isinstance(each, ast.Compare) and scope.find(each) is not None)
        for each in parts
    )


def _constants(tree: ast.Module) -> dict[str, float]:
    return {
        node.targets[0].id: float(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
    }


def _sleepers(tree: ast.Module) -> set[str]:
    """Return the names of events and conditions, whose `wait` does not fail."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and name_of(node.value) in SLEEPERS:
            names |= {name_of(target) for target in node.targets}
        if isinstance(node, ast.AnnAssign) and name_of(node.annotation) in SLEEPERS:
            names.add(name_of(node.target))
        if isinstance(node, ast.arg) and node.annotation and name_of(node.annotation) in SLEEPERS:
            names.add(node.arg)
    return names


def _failing_calls(function: Function, sleepers: set[str]) -> Iterator[ast.Call]:
    """Yield the calls whose timeout fails the test: it is neither expected nor handled, nor only a pause."""
    handled = {
        part for node in ast.walk(function) for each in _handled(node) for part in ast.walk(each)
    }
    asserted = {
        part
        for node in ast.walk(function)
        if isinstance(node, ast.Assert) and not _is_negated(node.test)
        for part in ast.walk(node.test)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or node in handled:
            continue
        if node in asserted or not _is_pause(node, sleepers):
            yield node


def _is_pause(call: ast.Call, sleepers: set[str]) -> bool:
    """Return True for calls that return at their limit, and for clients, whose limit applies to each later call."""
    name, owner = name_of(call.func), ""
    if isinstance(call.func, ast.Attribute):
        owner = name_of(call.func.value)
    return owner in sleepers or (owner, name) == ("asyncio", "wait") or name.endswith(CLIENTS)


def _is_negated(test: ast.AST) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _handled(node: ast.AST) -> Iterable[ast.AST]:
    """Return the statements in which a timeout is expected or handled."""
    if isinstance(node, ast.Try) and node.handlers:
        return node.body
    if isinstance(node, ast.With | ast.AsyncWith) and any(
        name_of(item.context_expr) in EXPECTED for item in node.items
    ):
        return [*node.body, *(item.context_expr for item in node.items)]
    return []


def _limits(call: ast.Call, constants: dict[str, float]) -> Iterator[float]:
    """Yield the limits of a wait in seconds, as far as the module defines them."""
    place = WAITS.get(name_of(call.func), len(call.args))
    if name_of(call.func) == "wait_for" and len(call.args) > 2:
        place = 2  # of `wait_for(what, look, seconds)` of the cluster
    given = [*call.args[place : place + 1]]
    given += [each.value for each in call.keywords if each.arg in KEYWORDS]
    for each in given:
        if isinstance(each, ast.Constant) and isinstance(each.value, int | float):
            if not isinstance(each.value, bool):
                yield float(each.value)
        elif isinstance(each, ast.Name) and each.id in constants:
            yield constants[each.id]
