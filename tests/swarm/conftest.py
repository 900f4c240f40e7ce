"""Swarms that several files of tests share: starting one costs seconds of processor time per server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from swarm.models import load_whole, make_model
from swarm.running import Running, local_settings, running_swarm
from transformers import PreTrainedModel

TOY_BLOCKS = 8
TOY_LENGTH = 1024


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 8 blocks, heavy enough that a long prompt takes a moment to read."""
    torch.set_num_threads(1)
    return make_model(
        tmp_path_factory.mktemp("toy"),
        blocks=TOY_BLOCKS,
        hidden_size=128,
        intermediate_size=256,
        max_position_embeddings=TOY_LENGTH,
        initializer_range=0.1,
        shard_size="1MB",
    )


@pytest.fixture(scope="session")
def toy_model(toy_folder: Path) -> PreTrainedModel:
    return load_whole(toy_folder)


@pytest.fixture(scope="session")
def four_spans(toy_folder: Path) -> Iterator[Running]:
    """4 spans x 2 servers of the toy; prompts are read in small parts."""
    settings = local_settings("four", token_budget=16)
    with running_swarm(toy_folder, "four", spans=4, replicas=2, settings=settings) as running:
        yield running


@pytest.fixture(scope="session")
def hash_spans(toy_folder: Path) -> Iterator[Running]:
    """The same on the hash model: its answers are exact."""
    settings = local_settings("hash", hash_model=True, token_budget=8)
    with running_swarm(toy_folder, "hash", spans=4, replicas=2, settings=settings) as running:
        yield running
