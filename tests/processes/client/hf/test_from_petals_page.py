"""The example of docs/reference/from-petals.md runs as it is, and its arguments are those that the client knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.swarm import Running

from modelswarm.client.hf.arguments import LOGITS

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "from-petals.md").read_text(
    encoding="utf-8"
)
ADDRESS = "127.0.0.1:8001"


@pytest.mark.parametrize("place", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
@pytest.mark.full
def test_example_of_the_page_runs(toy_swarm: Running, toy_folder: Path, place: int) -> None:
    example = python_examples(PAGE)[place]
    assert len(python_examples(PAGE)) == 3
    assert example.count('"MODEL"') == 1
    script = example.replace('"MODEL"', repr(str(toy_folder)))
    run_example(script, ADDRESS, toy_swarm.local.grpc)


def test_page_names_the_arguments_that_need_logits() -> None:
    section = PAGE.split("\n## Arguments of generate\n")[1].split("\n## ")[0]
    row = next(
        line for line in section.splitlines() if line.startswith("| at the client, on the logits")
    )
    assert set(LOGITS) <= set(re.findall(r"`(\w+)`", row))
