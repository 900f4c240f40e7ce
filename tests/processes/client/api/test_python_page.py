"""The examples of docs/python.md run as they are, against a real swarm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.swarm import ENDLESS, Endpoints, two_spans

PAGE = Path(__file__).parents[4] / "docs" / "python.md"
EXAMPLES = python_examples(PAGE.read_text(encoding="utf-8"))
ADDRESS = "127.0.0.1:8000"


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    with two_spans(tmp_path_factory.mktemp("page"), context=ENDLESS) as swarm:
        yield swarm.gateway()


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_of_the_python_page_runs(endpoints: Endpoints, example: str) -> None:
    run_example(example, ADDRESS, endpoints.http)
