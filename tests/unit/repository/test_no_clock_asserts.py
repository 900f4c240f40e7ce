"""No assertion of the fast tier depends on a clock: on a busy machine it would fail although the product is right.

A test about time is marked `full`. One that needs a wait uses `eventually`, and makes the slow way impossible.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CLOCKS = {"monotonic", "perf_counter", "process_time", "monotonic_ns", "perf_counter_ns", "time"}
FILES = sorted(TESTS.rglob("test_*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_fast_tests_assert_on_no_clock(file: Path) -> None:
    assert find_clock_asserts(file.read_text(encoding="utf-8")) == []


def test_clock_asserts_are_found() -> None:
    source = """
def test_a():
    assert time.monotonic() - began < 5

def test_b():
    took = perf_counter() - began
    assert 1 < took < 5

@pytest.mark.full
def test_c():
    assert time.time() < 5

def test_d(clock):
    assert reads == [time.strftime("%H"), clock.time(5)]
"""
    assert find_clock_asserts(source) == [3, 7]
    assert find_clock_asserts("pytestmark = pytest.mark.full\n" + source) == []


def find_clock_asserts(source: str) -> list[int]:
    """Return the lines of assertions that read a clock or compare what was read from one."""
    tree = ast.parse(source)
    if any(isinstance(node, ast.Assign) and is_slow_mark(node) for node in tree.body):
        return []
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    fast = [each for each in functions if not any(map(is_slow_mark, each.decorator_list))]
    return sorted({line for function in fast for line in find_clock_asserts_in(function)})


def is_slow_mark(node: ast.AST) -> bool:
    """Return True for `pytestmark = pytest.mark.full` and `@pytest.mark.full`, not for a marked parameter."""
    mark = node.value if isinstance(node, ast.Assign) else node
    return isinstance(mark, ast.Attribute) and mark.attr in ("full", "soak")


def find_clock_asserts_in(function: Function) -> list[int]:
    times = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and reads_clock(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
        and (reads_clock(node.test) or compares_any(node.test, times))
    ]


def reads_clock(node: ast.AST) -> bool:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and not each.args]
    called = [call.func for call in calls]
    names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in called}
    return bool(names & CLOCKS)


def compares_any(node: ast.AST, names: set[str]) -> bool:
    compared = [each for each in ast.walk(node) if isinstance(each, ast.Compare)]
    return any(
        isinstance(part, ast.Name) and part.id in names
        for compare in compared
        for part in ast.walk(compare)
    )
