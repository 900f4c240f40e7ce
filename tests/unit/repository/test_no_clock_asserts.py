"""No assertion of the fast tier depends on a clock: on a busy machine it would fail although the product is right.

A test about time is marked `full`. A test that needs a wait uses `eventually`, and makes the slow way impossible.
Helpers and fixtures are checked as well. Each rule has an example that must be found, or must not.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest
from support.clock_lint import find_clock_asserts, find_short_limits

TESTS = Path(__file__).parents[2]
FILES = sorted(TESTS.rglob("*.py"))
WAIT = TESTS / "support" / "eventually.py"  # the one place that compares a clock with a limit
VIRTUAL = (TESTS / "core", TESTS / "support" / "core")  # where `wait(0.5)` advances a virtual clock


def name(file: Path) -> str:
    return str(file.relative_to(TESTS))


@pytest.mark.parametrize("file", [file for file in FILES if file != WAIT], ids=name)
def test_fast_tests_assert_on_no_clock(file: Path) -> None:
    assert find_clock_asserts(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "file", [file for file in FILES if not any(map(file.is_relative_to, VIRTUAL))], ids=name
)
def test_waits_of_fast_tests_have_generous_limits(file: Path) -> None:
    assert find_short_limits(file.read_text(encoding="utf-8")) == []


FORBIDDEN = {
    "read in the assertion": "assert time.monotonic() - began < 5",
    "variable": "took = perf_counter() - began\nassert 1 < took < 5",
    "derived twice": "end = monotonic()\ntook = end - began\nhalf = took / 2\nassert half < 5",
    "before its source": "for _ in range(2):\n    assert b < 5\n    b = a\n    a = monotonic() - began",
    "tuple target": "answer, took = ask(), monotonic() - began\nassert took < 5",
    "nested tuple target": "(a, (b, c)) = 1, (2, monotonic() - began)\nassert c < 5",
    "annotated target": "took: float = monotonic() - began\nassert took < 5",
    "attribute target": "self.took = monotonic() - began\nassert self.took < 5",
    "augmented target": "took = 0.0\ntook += monotonic() - began\nassert took < 5",
    "walrus target": "assert (took := monotonic() - began) < 5",
    "element of a list": "times.append(monotonic() - began)\nassert max(times) < 5",
    "loop target": "times.append(monotonic() - began)\nfor t in times:\n    assert t < 5",
    "comprehension": "gaps = [monotonic() - b for b in begins]\nassert all(g < 5 for g in gaps)",
    "dictionary value": "took[name] = monotonic() - began\nassert took[name] < 5",
    "datetime": "took = datetime.now(UTC) - began\nassert took.total_seconds() < 5",
    "date and time": "assert datetime.datetime.utcnow() < end",
    "nanoseconds": "assert time.monotonic_ns() < end",
    "flag": "is_fast = monotonic() - began < 5\nassert is_fast and done",
    "negated lower bound": "is_slow = monotonic() - began > 5\nassert not is_slow",
    "time left": "end = monotonic() + 5\nleft = end - monotonic()\nassert left > 0",
    "equality": "assert round(monotonic() - began) == 1",
    "pytest.fail": "if monotonic() > end:\n    pytest.fail('too late')",
    "raised error": "if monotonic() > end:\n    raise AssertionError('too late')",
    "failure in a branch": "if monotonic() > end:\n    if error:\n        raise TimeoutError",
    "else branch": "if monotonic() < end:\n    go()\nelse:\n    pytest.fail('too late')",
    "expired loop": "while monotonic() < end:\n    look()\nraise AssertionError('too late')",
    "else of a loop": "while monotonic() < end:\n    look()\nelse:\n    pytest.fail('too late')",
    "nested function": "def f():\n    assert monotonic() < 5\nf()",
    "helper": "assert measure() < 5",
    "helper in a variable": "answer, took = ask_timed()\nassert took < 5",
    "method": "assert self.measured() < 5",
}
ALLOWED = {
    "lower bound": "assert monotonic() - began >= 5",
    "lower bound in a variable": "took = monotonic() - began\nassert 5 < took",
    "lower bound of all": "times.append(monotonic() - began)\nassert all(t > 1 for t in times)",
    "negated upper bound": "assert not monotonic() - began < 5",
    "failure below a bound": "if monotonic() - began < 5:\n    pytest.fail('too early')",
    "presence": "took = monotonic() - began\nassert took is not None",
    "other clocks": "assert reads == [time.strftime('%H'), clock.time(5), world.now()]",
    "the message": "assert done, f'after {monotonic() - began}'",
    "other names": "took = monotonic() - began\nassert count < 5",
    "pause": "while monotonic() < end:\n    look()\nassert found",
}
AROUND = """
began = monotonic()

def measure():
    begin = perf_counter()
    ask()
    end = perf_counter()
    return end - begin

def ask_timed():
    return ask(), measure()

class Timer:
    def measured(self):
        return self.end - self.begin

    def stop(self):
        self.begin, self.end = 1.0, monotonic()

def test_it(self):
    began = monotonic()
"""


@pytest.mark.parametrize("body", FORBIDDEN.values(), ids=FORBIDDEN)
def test_assertion_on_a_clock_is_found(body: str) -> None:
    assert len(find_clock_asserts(AROUND + indent(body, "    "))) == 1


@pytest.mark.parametrize("body", ALLOWED.values(), ids=ALLOWED)
def test_assertion_that_is_no_upper_bound_is_allowed(body: str) -> None:
    assert find_clock_asserts(AROUND + indent(body, "    ")) == []


SHORT = {
    "wait_for": "await asyncio.wait_for(call(), 0.5)",
    "wait_for by name": "await asyncio.wait_for(call(), timeout=0.5)",
    "timeout": "async with asyncio.timeout(5):\n    await call()",
    "process": "assert process.wait(5) == 0",
    "statement": "self.processes['a'].wait(5)",
    "constant": "process.wait(SOON)",
    "event": "assert event.wait(1)",
    "thread": "thread.join(5)\nassert not thread.is_alive()",
    "eventually": "eventually('it', look, 2)",
    "eventually by name": "eventually('it', look, seconds=2.0)",
    "wait of a cluster": "wait_for('it', look, 5)",
    "call": "stub.Generate(asked, timeout=2)",
}
GENEROUS = {
    "long": "await asyncio.wait_for(call(), 60)",
    "default": "eventually('it', look)",
    "expected": "with pytest.raises(TimeoutError):\n    await asyncio.wait_for(call(), 0.5)",
    "expected block": "with pytest.raises(E):\n    async with asyncio.timeout(5):\n        await call()",
    "handled": "try:\n    process.wait(0.1)\nexcept TimeoutExpired:\n    process.kill()",
    "pause": "event.wait(0.1)",
    "absence": "assert not event.wait(0.1)",
    "sets": "await asyncio.wait(tasks, timeout=1)",
    "text": "', '.join(parts)",
    "client": "client = httpx.Client(timeout=5)",
}
WAITING = """
SOON = 3.0

async def test_it():
    event = threading.Event()
"""


@pytest.mark.parametrize("body", SHORT.values(), ids=SHORT)
def test_short_limit_is_found(body: str) -> None:
    assert len(find_short_limits(WAITING + indent(body, "    "))) == 1


@pytest.mark.parametrize("body", GENEROUS.values(), ids=GENEROUS)
def test_limit_that_fails_no_test_is_allowed(body: str) -> None:
    assert find_short_limits(WAITING + indent(body, "    ")) == []


@pytest.mark.parametrize(
    "mark",
    [
        "@pytest.mark.full\ndef test_it():\n    {}",
        "@pytest.mark.soak\nclass TestAll:\n    def test_it(self):\n        {}",
        "pytestmark = pytest.mark.full\ndef test_it():\n    {}",
        "pytestmark = [pytest.mark.timeout(5), pytest.mark.full]\ndef test_it():\n    {}",
    ],
)
def test_tests_of_other_tiers_may_use_a_clock(mark: str) -> None:
    assert find_clock_asserts(mark.format("assert monotonic() < 5")) == []
    assert find_short_limits(mark.format("process.wait(1)")) == []


def test_marked_parameter_leaves_its_test_in_the_fast_tier() -> None:
    mark = "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.full)])\n"
    assert find_clock_asserts(f"{mark}def test_it(x):\n    assert monotonic() < 5") == [3]
