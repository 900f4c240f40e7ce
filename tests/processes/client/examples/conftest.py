"""The swarm of examples/counting.yaml: two spans of the demo model with two replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.processes.swarm import Running, local_settings, running_swarm

from modelswarm.demo import counting_folder


@pytest.fixture(scope="package")
def counting() -> Iterator[Running]:
    settings = local_settings("examples")
    with running_swarm(
        counting_folder(), "examples", spans=2, replicas=2, settings=settings
    ) as running:
        yield running
