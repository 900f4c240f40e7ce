"""An engine on the toy, split over four spans with two servers each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.processes.swarm import Running

from modelswarm import Engine


@pytest.fixture(scope="package")
def engine(four_spans: Running) -> Iterator[Engine]:
    with Engine(f"http://{four_spans.local.http}") as made:
        yield made
