"""One swarm of two spans with two replicas, and the Hugging Face model that asks its gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.swarm import Running, running_swarm


@pytest.fixture(scope="package")
def toy_swarm(toy_folder: Path) -> Iterator[Running]:
    with running_swarm(toy_folder, "training", spans=2, replicas=2, sessions=12) as running:
        yield running


@pytest.fixture(scope="package")
def model(toy_swarm: Running, toy_folder: Path) -> Any:
    from modelswarm.client.hf import AutoDistributedModelForCausalLM

    return AutoDistributedModelForCausalLM.from_pretrained(toy_folder, gateway=toy_swarm.local.grpc)
