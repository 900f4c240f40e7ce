"""The runner of the tiers: its counts, and the report of a test that passes only when repeated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.ci import run_tests
from tools.ci.run_tests import Part

TESTS = """
from pathlib import Path
import pytest

def test_good():
    pass

def test_skipped():
    pytest.skip("no reason")

def test_second_time():
    mark = Path(__file__).with_name("ran")
    again = mark.exists()
    mark.touch()
    assert again
"""


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect all files of the runner into a folder of the test. No plugin is loaded: that takes a second."""
    folder = tmp_path / "results"
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "RESULTS", folder)
    monkeypatch.setattr(run_tests, "CACHE", tmp_path)
    monkeypatch.setattr(run_tests, "LEDGER", tmp_path / "flaky.log")
    return folder


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
    source: str = TESTS,
    extra: Sequence[str] = ("-q",),
    needs_cluster: bool = False,
) -> int:
    file = tmp_path / "test_these.py"
    file.write_text(source)
    part = Part("p", (str(file),), timing=True, needs_cluster=needs_cluster)
    lanes: dict[str, Sequence[Sequence[Part]]] = {tier: [[part]]}
    monkeypatch.setattr(run_tests, "LANES", lanes)
    return run_tests.main(tier, extra)


def test_fast_tier_counts_and_never_repeats(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, monkeypatch, "fast") == 1
    assert (results / "summary.txt").read_text().endswith("\n1 passed, 1 failed, 1 skipped\n")


def test_full_tier_repeats_a_failed_test_and_calls_it_flaky(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, monkeypatch, "full") == 0
    summary = (results / "summary.txt").read_text()
    assert summary.endswith("\n2 passed, 0 failed, 1 skipped\n")
    assert "FLAKY" in summary and "test_second_time" in summary
    assert "test_second_time" in (tmp_path / "flaky.log").read_text()


MEETS = """
import time
from pathlib import Path

def test_meets():
    here = Path(__file__).parent
    {before}
    (here / "{own}").touch()
    end = time.monotonic() + 600
    while not (here / "{other}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
"""


def test_lanes_run_at_once_and_their_parts_in_order(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    for name, other, before in (
        ("first", "other", "assert not (here / 'second').exists()"),
        ("second", "first", "assert (here / 'first').exists()"),
        ("other", "first", ""),
    ):
        file = tmp_path / f"test_{name}.py"
        file.write_text(MEETS.format(own=name, other=other, before=before))
        parts.append(Part(name, (str(file),), beside=name != "other"))
    first, second, beside = parts
    monkeypatch.setattr(run_tests, "LANES", {"fast": [[first, second], [beside]]})
    assert run_tests.main("fast", ("-q",)) == 0
    assert (results / "summary.txt").read_text().endswith("\n3 passed, 0 failed, 0 skipped\n")


@pytest.mark.full
def test_full_tier_fails_on_a_test_that_fails_twice(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, monkeypatch, "full", "def test_bad():\n    assert False\n") == 1
    summary = (results / "summary.txt").read_text()
    assert summary.endswith("\n0 passed, 1 failed, 0 skipped\n") and "FLAKY" not in summary


def test_file_that_cannot_be_imported_is_a_failure(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, monkeypatch, "fast", "import no_such_module\n") == 1
    assert "ended with exit code 2" in (results / "summary.txt").read_text()


ABORTS = """
import os

def test_fails_once():
    from pathlib import Path
    mark = Path(__file__).with_name("ran")
    again = mark.exists()
    mark.touch()
    assert again

def test_ends_the_run():
    os._exit(3)
"""


@pytest.mark.full
def test_part_that_was_aborted_stays_failed_after_a_rerun(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborting = ABORTS.replace("os._exit(3)", "raise KeyboardInterrupt")
    assert run(tmp_path, monkeypatch, "full", aborting) == 1
    assert "ended with exit code 2" in (results / "summary.txt").read_text()
    assert run(tmp_path, monkeypatch, "full", ABORTS) == 1
    assert "ended with exit code 3" in (results / "summary.txt").read_text()


@pytest.mark.full
def test_part_without_a_test_is_a_failure(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import pytest\npytestmark = pytest.mark.soak\ndef test_long():\n    pass\n"
    assert run(tmp_path, monkeypatch, "fast", source, extra=()) == 1
    assert "no test was selected" in (results / "summary.txt").read_text()
    assert run(tmp_path, monkeypatch, "fast", source, extra=("-k", "other")) == 0


def test_skip_that_the_cluster_forbids_is_a_failure(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import pytest\ndef test_one():\n    pass\ndef test_two():\n    pytest.skip('no')\n"
    monkeypatch.setenv("REQUIRE_CLUSTER", "1")
    assert run(tmp_path, monkeypatch, "fast", source, needs_cluster=True) == 1
    assert "allows no skipped test" in (results / "summary.txt").read_text()
    assert run(tmp_path, monkeypatch, "fast", source) == 0
