"""A real swarm under a seeded schedule of faults, judged by every oracle: a sample of what `make chaos` does."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from chaos.__main__ import options_of
from chaos.run import Options, Outcome, chaos
from chaos.schedule import Fault
from support.models.tiny_models import make_toy

ROOT = Path(__file__).parents[2]
SAMPLE = Options(
    seconds=20,
    seed=8613,
    streams=8,
    gateways=2,
    every=2.0,
    new=200,
    faults=frozenset(
        (
            *(Fault.KILL, Fault.LEAVE, Fault.DRAIN, Fault.FREEZE, Fault.ONE_WAY, Fault.CUT_OFF),
            *(Fault.TRUNCATE, Fault.GATEWAY_KILL),
        )
    ),
    each=True,
)
"""By this seed none of the faults takes away all that others leave, so no client waits long (`waiting_bounds.py`). The
tails run while a gateway is lost, so nothing that was read may be lost with it. Two clients at each gateway go on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("chaos"))


def check(outcome: Outcome) -> None:
    assert not outcome.wrong, outcome.report()
    assert outcome.faults, "no fault was injected"
    assert outcome.tally.answers, "nothing was answered"


@pytest.mark.full
def test_disturbed_swarm_answers_exactly(folder: Path) -> None:
    outcome = chaos(SAMPLE, folder)
    check(outcome)
    assert outcome.faults == Counter(SAMPLE.faults)
    assert all(outcome.effective[fault] for fault in SAMPLE.faults), outcome.summary()
    assert outcome.tally.resumed, f"no answer outlived its gateway: {outcome.summary()}"


@pytest.mark.parametrize(
    "options",
    (
        SAMPLE,
        Options(),
        Options(model="torch", seconds=100 / 3, seed=0, streams=3, spans=4, replicas=3),
        Options(every=0.7, new=7, each=True, faults=frozenset((Fault.SLOW_DISK,))),
    ),
)
def test_printed_command_repeats_the_run(options: Options) -> None:
    """All of it: through `make`, the shell and the command line."""
    make = ["make", "--no-print-directory", "-n", *shlex.split(options.command())[1:]]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(make, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout.partition("PYTHONPATH=tests")[2].replace("\\\n", ""))
    assert options_of(words[words.index("chaos") + 1 :]) == [options]


@pytest.mark.soak
@pytest.mark.parametrize("model", ("hash", "torch"))
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("spans", "gateways"), ((2, 1), (4, 2)))
def test_a_swarm_is_disturbed_for_minutes(
    folder: Path, model: str, seed: int, spans: int, gateways: int
) -> None:
    options = Options(model=model, seconds=120, seed=seed, spans=spans, gateways=gateways)
    check(chaos(options, folder))
