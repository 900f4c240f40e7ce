"""The runner of the tiers: its counts, and the report of a test that passes only when it is repeated."""

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
    """Redirect all files of the runner into a folder of the test."""
    folder = tmp_path / "results"
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "RESULTS", folder)
    monkeypatch.setattr(run_tests, "CACHE", tmp_path)
    monkeypatch.setattr(run_tests, "LEDGER", tmp_path / "flaky.log")
    return folder


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, source: str = TESTS) -> int:
    file = tmp_path / "test_these.py"
    file.write_text(source)
    steps: dict[str, Sequence[Sequence[Part]]] = {tier: [[Part("p", (str(file),), timing=True)]]}
    monkeypatch.setattr(run_tests, "STEPS", steps)
    return run_tests.main(tier, ["-q"])


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
    assert " 1 failed, " in (results / "summary.txt").read_text()
