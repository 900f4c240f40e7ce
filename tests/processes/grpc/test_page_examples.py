"""The Python examples of docs/reference/grpc.md run as they are, against a real swarm."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.swarm import Endpoints

PAGE = (Path(__file__).parents[3] / "docs/reference/grpc.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## gRPC (port 8001)\n")[1].split("\n## ")[0]
EXAMPLES = python_examples(SECTION)
*RUN_HERE, PASSES = EXAMPLES  # the hash model has no gradients: client/training runs the last one
ADDRESS = "127.0.0.1:8001"


def test_section_has_an_example_for_each_part() -> None:
    assert len(EXAMPLES) == 1 + SECTION.count("\n### ")


def test_last_example_is_that_of_passes() -> None:
    assert ".BlockPass(" in PASSES


@pytest.mark.parametrize("example", RUN_HERE, ids=range(len(RUN_HERE)))
def test_example_of_the_grpc_section_runs(endpoints: Endpoints, example: str) -> None:
    run_example(example, ADDRESS, endpoints.grpc)
