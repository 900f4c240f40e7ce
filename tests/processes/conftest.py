"""Swarms shared by several test files: a start costs seconds of processor time per server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from support.models.tiny_models import JUDGED, make_toy
from support.processes.kill_scenarios import KEPT_SECONDS
from support.processes.swarm import (
    ENDLESS,
    Endpoints,
    HashSwarm,
    Running,
    local_settings,
    running_swarm,
    two_spans,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = ("--session-idle", f"{KEPT_SECONDS}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if JUDGED.tokens:
        terminalreporter.write_line(
            f"{JUDGED.tokens} tokens of transformer swarms judged by the whole model: "
            f"{JUDGED.near_ties} near ties, {JUDGED.flips} of them fell the other way"
        )


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def endless_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the toy for the hash model, with a context so long that no answer ends before its test."""
    return make_toy(tmp_path_factory.mktemp("endless"), length=ENDLESS)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    """Yield two spans of the hash model with an endless context, for one file: its tests may kill servers."""
    with two_spans(tmp_path_factory.mktemp("swarm"), context=ENDLESS) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(swarm: HashSwarm) -> Endpoints:
    """Return the gateway of the file's swarm."""
    return swarm.gateway()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield an HTTP client of the gateway of a small swarm that no test harms."""
    with (
        two_spans(tmp_path_factory.mktemp("client")) as made,
        httpx.Client(base_url=made.gateway().url, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="session")
def toy_model(toy_folder: Path) -> PreTrainedModel:
    import torch
    from support.models.tiny_models import load_whole

    torch.set_num_threads(1)
    return load_whole(toy_folder)


@pytest.fixture(scope="session")
def four_spans(toy_folder: Path) -> Iterator[Running]:
    """Yield 4 spans x 2 servers of the toy; prompts are read in small parts."""
    settings = local_settings("four", token_budget=16, gateway_flags=KEPT)
    with running_swarm(toy_folder, "four", spans=4, replicas=2, settings=settings) as running:
        yield running


@pytest.fixture(scope="session")
def hash_spans(endless_folder: Path) -> Iterator[Running]:
    """Yield 4 spans x 2 servers of the hash model, with exact answers and an endless context."""
    settings = local_settings("hash", hash_model=True, token_budget=8, gateway_flags=KEPT)
    with running_swarm(
        endless_folder, "hash", spans=4, replicas=2, length=ENDLESS, settings=settings
    ) as running:
        yield running
