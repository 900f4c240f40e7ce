"""The examples of docs/python.md run as they are, against a real swarm with a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.swarm import Running

PAGE = Path(__file__).parents[4] / "docs" / "python.md"
EXAMPLES = python_examples(PAGE.read_text(encoding="utf-8"))
ADDRESS = "127.0.0.1:8000"


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
@pytest.mark.full
def test_example_of_the_python_page_runs(four_spans: Running, example: str) -> None:
    run_example(example, ADDRESS, four_spans.local.http)
