"""SIGKILL of real servers of a family on the generic path: DeepSeek, whose pages hold latent vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models.tiny_models import VOCAB, load_whole, make_model
from support.processes.kill_scenarios import SAMPLED, kill_in_decode, prompt_of
from support.processes.oracles import check_contiguous, check_tokens
from support.processes.streams import Request
from support.processes.swarm import Running, local_settings, running_swarm

pytestmark = pytest.mark.full

LENGTH = 1024  # positions of a context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("latent")
    return make_model(folder, "deepseek_v3", max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[Running]:
    settings = local_settings("latent", token_budget=16)
    with running_swarm(folder, "latent", spans=2, replicas=2, settings=settings) as running:
        yield running


@pytest.mark.parametrize("place", [0, 1])
def test_kill_during_decode_changes_no_latent_token(
    swarm: Running, folder: Path, place: int
) -> None:
    request = Request(prompt_of(100, 2, VOCAB), LENGTH - 100, SAMPLED)
    answer = kill_in_decode(swarm, request, place, at=20)
    check_contiguous(answer)
    check_tokens(load_whole(folder), answer)
