"""Change the product by one line at a time, and count the changes that the tests catch: `make mutants`.

A mutant is one edit of an expression or statement in a core, in routing or in the operator's reconcile. It changes a
comparison, a condition, a constant, `and` or `min`, or leaves out a call. A seed draws the sample, in equal shares.
Each mutant is written into a clone of HEAD under build/mutants, and the tests of its group run there until one fails.
Known survivors are in tools/ci/mutants.toml with the reason. Exit code 1 if fewer are caught than the tier must catch.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random

ROOT = Path(__file__).resolve().parents[2]
TREES = ROOT / "build" / "mutants"
SURVIVORS = ROOT / "tools" / "ci" / "mutants.toml"
MARKERS = {"fast": "not full and not soak", "full": "not soak"}
BARS = {"fast": 0.9, "full": 0.95}  # shares of the sample that must be caught
TIMEOUT_SECONDS = 3600.0  # of one run of pytest; a mutant that never ends is caught
TEST_SECONDS = 300  # of one test
PER_FUNCTION = 2  # mutants of one function in a sample
NO_TESTS = 5  # pytest's exit code where no test was selected

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT = ("log", "_log")  # calls of these change no behaviour


@dataclass(frozen=True, slots=True)
class Group:
    """Files that are changed alike, and the tests that are run for them, quickest first."""

    name: str
    folder: str
    tests: tuple[tuple[str, ...], ...]
    without: str = ""


_CORE_TESTS = (("tests/core", "--ignore=tests/core/simulation"), ("tests/core/simulation",))
_PROCESSES = ("tests/processes", "tests/chaos")
_GATEWAY = "gateway/modelswarm_gateway/core"
GROUPS = (
    Group(
        "server core",
        "serving/modelswarm_serving/core",
        (("tests/core/server", "tests/unit/serving"), *_CORE_TESTS, _PROCESSES),
    ),
    Group(
        "gateway core",
        _GATEWAY,
        (("tests/core/gateway", "tests/core/takeover"), *_CORE_TESTS, ("tests/unit/gateway",), _PROCESSES),
        without=f"{_GATEWAY}/routing",
    ),
    Group(
        "routing",
        f"{_GATEWAY}/routing",
        (
            ("tests/core/routing", "tests/unit/gateway/routing"),
            *_CORE_TESTS,
            ("tests/unit/gateway",),
            _PROCESSES,
        ),
    ),
    Group(
        "reconcile",
        "operator/modelswarm_operator/reconcile",
        (("tests/unit/operator",), ("tests/cluster/operator",), ("tests/cluster",)),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    group: Group
    path: str  # in the repository
    function: str  # qualified name; empty at module level
    line: int
    start: int  # offsets in the file's bytes
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: `{self.old}` -> `{self.new}`"


@dataclass(frozen=True, slots=True)
class Outcome:
    mutant: Mutant
    caught_by: str  # the first folder of the tests that failed; empty for a survivor
    seconds: float


def main() -> int:
    options = parse()
    sample = draw(options.count, options.seed, options.only)
    if options.list:
        print(*sample, sep="\n")
        return 0
    print(
        f"{len(sample)} mutants, tests of the {options.tier} tier, {options.jobs} at a time",
        flush=True,
    )
    outcomes = run_all(sample, options.tier, options.jobs)
    return report(outcomes, options.tier)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws another sample")
    parser.add_argument("--only", default="", help="only mutants whose path contains this text")
    parser.add_argument("--tier", choices=MARKERS, default="fast", help="which tests are run")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time, a clone for each")
    parser.add_argument("--list", action="store_true", help="print the sample, run nothing")
    return parser.parse_args()


def draw(count: int, seed: int, only: str = "") -> list[Mutant]:
    """Return a sample of `count` mutants, an equal share from each group that has any."""
    pools = []
    for group in GROUPS:
        pool = [m for m in mutants_of_group(group) if only in m.path]
        Random(f"{seed} {group.name}").shuffle(pool)
        if pool:
            pools.append(iter(_limit_per_function(pool)))
    sample: list[Mutant] = []
    while pools and len(sample) < count:
        for pool_iterator in list(pools):
            mutant = next(pool_iterator, None)
            if mutant is None:
                pools.remove(pool_iterator)
            elif len(sample) < count:
                sample.append(mutant)
    return sample


def _limit_per_function(pool: Sequence[Mutant]) -> list[Mutant]:
    counts: dict[tuple[str, str], int] = {}
    kept = []
    for mutant in pool:
        key = mutant.path, mutant.function
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= PER_FUNCTION:
            kept.append(mutant)
    return kept


def mutants_of_group(group: Group) -> Iterator[Mutant]:
    for path in sorted((ROOT / group.folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not (group.without and name.startswith(group.without)):
            yield from mutants_of_file(group, name, path.read_bytes())


def mutants_of_file(group: Group, name: str, source: bytes) -> Iterator[Mutant]:
    """Yield every one-line mutant inside the functions of a file."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for function, node in _nodes_in_functions(ast.parse(source)):
        for target, new in edits(node):
            if target.lineno != target.end_lineno or target.end_col_offset is None:
                continue
            start = starts[target.lineno - 1] + target.col_offset
            end = starts[target.lineno - 1] + target.end_col_offset
            old = source[start:end].decode()
            yield Mutant(group, name, function, target.lineno, start, end, old, new)


def _nodes_in_functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified name, node) for the bodies of functions, without annotations, asserts, errors and logs."""
    stack: list[tuple[str, bool, ast.AST]] = [("", False, node) for node in tree.body]
    while stack:
        name, inside, node = stack.pop()
        if isinstance(node, ast.ClassDef):
            stack += [(f"{name}{node.name}.", False, child) for child in node.body]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("__"):  # a missing attribute of `__init__` fails at once
                stack += [(f"{name}{node.name}", True, child) for child in node.body]
        elif (
            inside
            and not isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr)
            and not _is_silent(node)
        ):
            yield name, node
            stack += [
                (name, True, child)
                for field, value in ast.iter_fields(node)
                if field != "annotation"
                for child in (value if isinstance(value, list) else [value])
                if isinstance(child, ast.AST)
            ]


def _is_silent(node: ast.AST) -> bool:
    """Return whether this is a docstring, or a call of a logger."""
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    if isinstance(call, ast.Constant):
        return True
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value).rpartition(".")[2] in SILENT
    )


def edits(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield (node to replace, new text) for each mutation of this node itself."""
    if isinstance(node, ast.expr):
        new = edit_of_expression(node)
        if new is not None:
            yield node, new
    elif isinstance(node, ast.stmt) and _is_removable(node):
        yield node, "pass"
    tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
    for test in tests:
        if isinstance(test, ast.expr):
            yield test, f"not ({ast.unparse(test)})"


def edit_of_expression(node: ast.expr) -> str | None:
    """Return the text of the mutated expression, or None if it has no mutation."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"{ast.unparse(left)} {COMPARISONS[type(op)]} {ast.unparse(right)}"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            return "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            lists = ast.List | ast.Tuple | ast.ListComp | ast.JoinedStr
            word = "-" if isinstance(op, ast.Add) else "+"
            is_list = isinstance(left, lists) or isinstance(right, lists)
            return None if is_list else f"({ast.unparse(left)} {word} {ast.unparse(right)})"
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() as value):
            return str(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in TWINS:
            return TWINS[name] + ast.unparse(node).removeprefix(name)
    return None


def _is_removable(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False


def run_all(sample: Sequence[Mutant], tier: str, jobs: int) -> list[Outcome]:
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        trees.put(make_tree(TREES / str(number)))

    def run(mutant: Mutant) -> Outcome:
        tree = trees.get()
        try:
            outcome = run_tests(mutant, tree, tier)
        finally:
            trees.put(tree)
        result = f"caught by {outcome.caught_by}" if outcome.caught_by else "SURVIVED"
        print(f"{result} ({outcome.seconds:.0f} s): {mutant}", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, sample))


def make_tree(path: Path) -> Path:
    """Return a clone of HEAD with its own environment."""
    if not path.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(path)], check=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    for words in (["fetch", "--quiet"], ["checkout", "--quiet", "--force", head]):
        subprocess.run(["git", *words], cwd=path, check=True)
    subprocess.run(["make", "--silent", "setup"], cwd=path, check=True, stdout=subprocess.DEVNULL)
    return path


def run_tests(mutant: Mutant, tree: Path, tier: str) -> Outcome:
    """Run the tests of the mutant's group until one fails. The file is restored."""
    began, file = time.monotonic(), tree / mutant.path
    source = file.read_bytes()
    file.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
    try:
        caught = next((paths[0] for paths in mutant.group.tests if fails(tree, paths, tier)), "")
    finally:
        file.write_bytes(source)
    return Outcome(mutant, caught, time.monotonic() - began)


def fails(tree: Path, paths: Sequence[str], tier: str) -> bool:
    """Return whether a test fails. RuntimeError if pytest could not run."""
    options = (
        "-x",
        "-q",
        "-m",
        MARKERS[tier],
        "-p",
        "no:cacheprovider",
        "--timeout",
        str(TEST_SECONDS),
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [".venv/bin/python", "-m", "pytest", *paths, *options]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    if done.returncode == NO_TESTS:
        raise RuntimeError(f"no test was selected in {paths}")
    return done.returncode != 0


def report(outcomes: Sequence[Outcome], tier: str) -> int:
    """Print the survivors with their reasons and the share that was caught; return the exit code."""
    reasons = read_reasons(SURVIVORS)
    survivors = [outcome.mutant for outcome in outcomes if not outcome.caught_by]
    for mutant in survivors:
        key = mutant.path, mutant.function, mutant.old, mutant.new
        print(f"survivor: {mutant}\n  {reasons.get(key, 'no reason is known')}")
    for group in GROUPS:
        own = [outcome for outcome in outcomes if outcome.mutant.group is group]
        print(f"{group.name}: {sum(bool(v.caught_by) for v in own)} of {len(own)} caught")
    share = 1 - len(survivors) / len(outcomes)
    print(
        f"{len(outcomes) - len(survivors)} of {len(outcomes)} caught: {share:.3f}, bar {BARS[tier]}"
    )
    return 0 if share >= BARS[tier] else 1


def read_reasons(path: Path) -> dict[tuple[str, str, str, str], str]:
    """Return why each known survivor survives, by (path, function, old text, new text)."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", [])
    return {(e["path"], e["function"], e["old"], e["new"]): e["reason"] for e in entries}


if __name__ == "__main__":
    sys.exit(main())
