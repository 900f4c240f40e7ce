"""A real swarm under a seeded schedule of faults, judged by every oracle: a sample of what `make chaos` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.run import Options, Outcome, chaos
from swarm.toy import make_toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("chaos"))


def check(outcome: Outcome) -> None:
    assert not outcome.wrong, outcome.report()
    assert outcome.faults, "no fault was injected"
    assert outcome.tally.answers, "nothing was answered"


def test_a_disturbed_swarm_answers_as_if_nothing_had_happened(folder: Path) -> None:
    options = Options(model="hash", seconds=8, seed=21, streams=5, every=0.7, new=40)
    check(chaos(options, folder))


@pytest.mark.soak
@pytest.mark.parametrize("model", ("hash", "torch"))
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("spans", "gateways"), ((2, 1), (4, 2)))
def test_a_swarm_is_disturbed_for_minutes(
    folder: Path, model: str, seed: int, spans: int, gateways: int
) -> None:
    options = Options(model=model, seconds=120, seed=seed, spans=spans, gateways=gateways)
    check(chaos(options, folder))
