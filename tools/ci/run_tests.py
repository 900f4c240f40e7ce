"""Run one tier of the tests: `fast` (make test), `full` (make test-all) or `soak`.

A tier is a list of parts, each one command with a log and a JUnit file under build/tests. Tests of processes and of
the cluster often wait, so they run beside each other, and beside what needs no processes, at low priority. In the full
tier a failed test of processes or of the cluster is run once more, alone. If it passes then, the summary names it as
FLAKY.
The last line is `N passed, N failed, N skipped`. Used by the Makefile. Knows paths and markers, no test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "tests"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelswarm"
LEDGER = CACHE / "flaky.log"  # of all trees of this machine: when, which commit, which test
MARKERS = {"fast": "not full and not soak", "full": "not soak", "soak": "soak"}
PLANS = {
    "fast": "types, pure tests, a sample of the simulator, processes, a cluster: 9 to 14 minutes",
    "full": "all tests but those that take hours: about an hour",
    "soak": "long outages, thousands of seeds, large clusters: several hours",
}
SLOWEST = 20  # of each part, at the end of its log
SECONDS_BETWEEN_LOOKS = 0.5
RUNNER = (sys.executable, "-m")
NO_TESTS = 5  # pytest's exit code where no test was selected
TESTS_FAILED = 1  # pytest's exit code where all tests were run and some failed


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    paths: tuple[str, ...] = ()  # none: types
    timing: bool = False  # its tests start processes and wait for them
    beside: bool = False  # runs beside others, at low priority, with its output in its log
    needs_cluster: bool = False  # its tests need the programs of the test cluster


@dataclass(slots=True)
class Result:
    part: Part
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    flaky: list[str] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""  # the part was not run to its end, or not as it must be

    def line(self) -> str:
        return (
            f"{self.part.name:<11}{self.passed:>6} passed {self.failed:>4} failed "
            f"{self.skipped:>4} skipped  in {self.seconds:.0f} s"
            + (f"; {self.problem}" if self.problem else "")
        )


TYPES = Part("types", beside=True)
UNIT = Part("unit", ("tests/unit", "tests/core", "--ignore=tests/core/simulation"), beside=True)
SIMULATOR = Part("simulator", ("tests/core/simulation",), beside=True)
PROCESSES = Part("processes", ("tests/processes", "tests/chaos"), timing=True)
CLIENTS = Part(
    "clients",
    ("tests/processes/api", "tests/processes/cli", "tests/processes/client"),
    timing=True,
    beside=True,
)
SERVERS = Part(
    "servers",
    (*PROCESSES.paths, *(f"--ignore={path}" for path in CLIENTS.paths)),
    timing=True,
)
CLUSTER = Part("cluster", ("tests/cluster",), timing=True, beside=True, needs_cluster=True)
Lane: TypeAlias = tuple[Part, ...]  # parts that run one after the other
LANES: dict[str, tuple[Lane, ...]] = {
    "fast": ((UNIT,), (SIMULATOR, TYPES), (CLUSTER,), (PROCESSES,)),
    "full": ((UNIT,), (SIMULATOR, TYPES), (CLUSTER,), (CLIENTS,), (SERVERS,)),
    "soak": ((Part("soak", ("tests",)),),),
}
"""The lanes of a tier run at the same time, the last one in the foreground. Nothing delays the unit tests, which take
longest."""


def main(tier: str, extra: Sequence[str], runner: Sequence[str] = RUNNER) -> int:
    """Run a tier and return the exit code. Python runs pytest by `runner`, with `extra` options of pytest."""
    if "--plan" in extra:
        tell(f"{tier} tests: {PLANS[tier]}; logs and durations go to {RESULTS.relative_to(ROOT)}")
        return 0
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    began = time.monotonic()
    results = run_lanes(LANES[tier], tier, extra, runner)
    if tier == "full":
        for result in results:
            run_again(result, tier, runner)
    return report(results, time.monotonic() - began)


def run_lanes(
    lanes: Sequence[Lane], tier: str, extra: Sequence[str], runner: Sequence[str]
) -> list[Result]:
    parts = [part for lane in lanes for part in lane]
    tell("running " + "; ".join(", then ".join(part.name for part in lane) for lane in lanes))
    waiting = [list(lane) for lane in lanes]
    running: list[Running | None] = [None] * len(lanes)
    results: dict[Part, Result] = {}
    try:
        while len(results) < len(parts):
            for number, queue in enumerate(waiting):
                current = running[number]
                if current is None and queue:
                    running[number] = Running.start(queue.pop(0), tier, extra, runner)
                elif current is not None and current.process.poll() is not None:
                    results[current.part], running[number] = current.read(extra), None
                    tell(results[current.part].line())
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        for left in running:
            if left is not None and left.process.poll() is None:
                left.process.terminate()
    for part in parts:
        if part.beside and results[part].failed:
            sys.stdout.write(log(part).read_text(errors="replace"))
    return [results[part] for part in parts]


@dataclass(frozen=True, slots=True)
class Running:
    """The part that a lane runs now."""

    part: Part
    process: subprocess.Popen[bytes]
    began: float  # time.monotonic

    @classmethod
    def start(cls, part: Part, tier: str, extra: Sequence[str], runner: Sequence[str]) -> Running:
        return cls(part, start(part, command(part, tier, extra, runner)), time.monotonic())

    def read(self, extra: Sequence[str]) -> Result:
        return read(self.part, self.process.returncode, time.monotonic() - self.began, extra)


def command(part: Part, tier: str, extra: Sequence[str], runner: Sequence[str]) -> list[str]:
    if not part.paths:
        return [sys.executable, "tools/ci/check_types.py"]
    timeout = ["--timeout", "3600"] if tier == "soak" else []
    return [
        *(*runner, "pytest", *part.paths, "-m", MARKERS[tier], *timeout),
        *(f"--durations={SLOWEST}", "--durations-min=1", "-o", f"cache_dir={cache(part)}"),
        *(f"--junitxml={junit(part)}", *extra),
    ]


def start(part: Part, words: Sequence[str]) -> subprocess.Popen[bytes]:
    if not part.beside:
        return subprocess.Popen(words, cwd=ROOT)
    nice = [] if part.timing else ["nice", "-n", "19"]
    with log(part).open("wb") as output:
        return subprocess.Popen([*nice, *words], cwd=ROOT, stdout=output, stderr=output)


def read(part: Part, code: int, seconds: float, extra: Sequence[str] = ()) -> Result:
    """Count what pytest wrote. A part that was not run to its end counts as one more failure, which a rerun keeps."""
    result = Result(part, seconds=seconds)
    if junit(part).exists():
        for suite in ElementTree.parse(junit(part)).iter("testsuite"):
            tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            result.passed += tests - skipped - failed
            result.failed += failed
            result.skipped += skipped
    elif code == 0:
        result.passed = 1
    result.problem = "" if code == NO_TESTS and extra else problem(result, code)
    if result.problem:
        result.failed += 1
    return result


def problem(result: Result, code: int) -> str:
    """Return the reason why the counts of a part prove nothing, or an empty string."""
    if code not in (0, TESTS_FAILED) or (code == TESTS_FAILED and not result.failed):
        return "no test was selected" if code == NO_TESTS else f"ended with exit code {code}"
    if not result.passed and not result.failed:
        return "no test was run"
    if result.skipped and result.part.needs_cluster and os.environ.get("REQUIRE_CLUSTER") == "1":
        return "REQUIRE_CLUSTER=1 allows no skipped test"
    return ""


def run_again(result: Result, tier: str, runner: Sequence[str]) -> None:
    """Run the failed tests of a part once more, alone; those that pass are flaky, and said to be so."""
    names = last_failed(result.part)
    if not result.part.timing or not names:
        return
    tell(f"running {len(names)} failed tests of {result.part.name} again")
    again = Part(f"{result.part.name}-again", tuple(names), timing=True)
    done = subprocess.run(command(again, tier, (), runner), cwd=ROOT, check=False)
    counted = read(again, done.returncode, 0.0)
    has_run = counted.passed + counted.failed >= len(names)
    still = set(last_failed(again)) if has_run else set(names)
    result.flaky = [name for name in names if name not in still]
    result.failed -= len(result.flaky)
    result.passed += len(result.flaky)
    record_flaky(result.flaky)


def last_failed(part: Part) -> list[str]:
    path = cache(part) / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


def record_flaky(names: Sequence[str]) -> None:
    """Append the tests to the ledger of this machine, with time and commit. Two lines of a test in a week: mend it."""
    describe = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    CACHE.mkdir(parents=True, exist_ok=True)
    with LEDGER.open("a", encoding="utf-8") as file:
        for name in names:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M')} {done.stdout.strip()} {name}\n")


def report(results: Sequence[Result], seconds: float) -> int:
    lines = [result.line() for result in results]
    lines += [
        f"FLAKY {name}: failed, and passed alone; see {LEDGER}"
        for result in results
        for name in result.flaky
    ]
    failed = sum(result.failed for result in results)
    lines.append(f"took {seconds / 60:.1f} minutes")
    lines.append(
        f"{sum(result.passed for result in results)} passed, {failed} failed, "
        f"{sum(result.skipped for result in results)} skipped"
    )
    (RESULTS / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n" + "\n".join(lines), flush=True)
    return 1 if failed else 0


def tell(text: str) -> None:
    print(f"--- {time.strftime('%H:%M:%S')} {text}", flush=True)


def log(part: Part) -> Path:
    return RESULTS / f"{part.name}.log"


def junit(part: Part) -> Path:
    return RESULTS / f"{part.name}.xml"


def cache(part: Part) -> Path:
    return RESULTS / "cache" / part.name


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in LANES:
        sys.exit(f"usage: run_tests.py {'|'.join(LANES)} [--plan] [pytest options]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
