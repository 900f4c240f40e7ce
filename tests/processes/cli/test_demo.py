"""`modelswarm demo` end to end: output, numbers and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.models.tiny_models import make_model
from support.processes.forked_process import fork_process
from support.processes.swarm import write_document

from modelswarm.cli.commands.demo import QUESTION
from modelswarm.cli.demo.comparison import Comparison, Recording
from modelswarm.cli.demo.demo import run_demo
from modelswarm.cli.demo.example import EXAMPLE_FILE as EXAMPLE
from modelswarm.client.inference import ReceivedChunk


def demo(document: Path, runtime: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "modelswarm.cli", "demo", str(document), *flags),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )


def test_make_demo_counts_to_200_through_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes are forked: five that import torch are most of the time of a demo."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code = run_demo(None, QUESTION, hash_model=False, spawn=fork_process)
    printed = capsys.readouterr().out

    assert code == 0, printed
    answer = printed.partition("kill in the middle:")[2].partition("route before")[0]
    before, _, rest = answer.partition("*** SIGKILL")
    words = [*before.split(), *rest.partition("***")[2].split()]
    assert words == [str(number) for number in range(1, 201)]
    assert "identical to the run without a failure: yes" in printed


@pytest.mark.full
def test_demo_prints_its_result_as_json(tmp_path: Path) -> None:
    """The hash function needs no torch, whose imports would be most of the time."""
    flags = ("--json", "--hash-model", "--question", "Count from 1 to 60.")
    done = demo(EXAMPLE, tmp_path, *flags)

    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["identical"] and result["migrated"] and result["tokens"] >= 60
    assert result["killed"] in result["route_before"]
    assert result["killed"] not in result["route_after"]
    assert 0 < result["median_gap_ms"] <= result["longest_gap_ms"] <= 1000 * result["seconds"]


def test_demo_needs_two_servers_of_every_span(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    document = write_document(tmp_path / "swarm.yaml", folder)

    done = demo(document, tmp_path)

    assert done.returncode == 2
    assert "spec.replicas: 1 leaves no server after a kill; allowed: 2 or more" in done.stderr


def recording(*parts: tuple[float, str, tuple[int, ...], int]) -> Recording:
    return Recording(tuple(ReceivedChunk(*part) for part in parts))


CALM = recording((0.0, "a", (1,), 5), (0.1, "b", (2,), 6), (0.2, "c", (3,), 7), (0.3, "", (), 0))


def test_gaps_are_between_arrivals_of_tokens() -> None:
    late = recording((0.0, "a", (1,), 5), (0.1, "", (), 0), (0.5, "bc", (2, 3), 6))

    assert late.gaps == (0.5,)
    assert CALM.longest_gap - 0.1 < 1e-9
    assert CALM.tokens == late.tokens == (1, 2, 3)


def test_run_is_identical_only_with_same_tokens_and_positions() -> None:
    same = recording((0.0, "a", (1,), 5), (9.0, "bc", (2, 3), 6))
    changed = recording((0.0, "a", (1,), 5), (9.0, "bc", (2, 4), 6))
    doubled = recording((0.0, "a", (1,), 5), (9.0, "bc", (2, 3), 5))
    shorter = recording((0.0, "ab", (1, 2), 5))

    comparisons = [Comparison(CALM, run, "x", ("y",)) for run in (same, changed, doubled, shorter)]

    assert [result.is_success for result in comparisons] == [True, False, False, False]


def test_session_that_did_not_move_is_a_failure() -> None:
    assert not Comparison(CALM, CALM, "x", ("w", "x")).is_success
    assert not Comparison(CALM, CALM, "x", ()).is_success
