"""examples/prompt_tuning.py lowers its loss, and a kill in the middle changes none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes.swarm import Running

EXAMPLE = Path(__file__).parents[4] / "examples" / "prompt_tuning.py"
LINE = re.compile(r"step (\d+): loss ([\d.]+) in [\d.]+ s")


def run_example(running: Running, at_step: Callable[[int], None]) -> tuple[list[float], str]:
    """Run the example, call `at_step` after each step, and return the losses and its last line."""
    environment = os.environ | {"MODELSWARM_GATEWAY": running.local.grpc, "OMP_NUM_THREADS": "1"}
    losses, last = list[float](), ""
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip()
            if (found := LINE.fullmatch(last)) is not None:
                losses.append(float(found[2]))
                at_step(int(found[1]))
    assert process.returncode == 0
    return losses, last


@pytest.mark.full
def test_example_lowers_the_loss(counting: Running) -> None:
    """A server is killed before a third and before two thirds of the steps are done."""

    def kill(step: int) -> None:
        if step in (8, 20):
            span = f"-s{step % 3 % 2}-"
            peer = next(member.peer for member in counting.members() if span in member.name)
            counting.kill(peer)

    losses, answer = run_example(counting, kill)
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 5, losses
    assert answer == "Who are you? A swarm."


@pytest.mark.full
def test_killed_servers_change_no_loss(counting: Running) -> None:
    counting.wait_whole()
    calm, _ = run_example(counting, lambda _: None)
    killed, _ = run_example(
        counting,
        lambda step: counting.kill(counting.members()[step % 4].peer) if step in (5, 15) else None,
    )
    assert killed == pytest.approx(calm, rel=1e-2)
