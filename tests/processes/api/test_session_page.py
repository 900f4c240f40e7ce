"""The Python examples of docs/sessions.md run as they are, against a real swarm."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.swarm import Endpoints

PAGE = Path(__file__).parents[3] / "docs" / "sessions.md"
EXAMPLES = python_examples(PAGE.read_text(encoding="utf-8"))
ADDRESS = "127.0.0.1:8000"


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_of_the_sessions_page_runs(gateway: Endpoints, example: str) -> None:
    run_example(example, ADDRESS, gateway.http)
