"""The examples of docs/reference/from-lmdeploy.md run as they are, against a real swarm."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.swarm import Endpoints

from modelswarm import GenerationConfig, Response

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "from-lmdeploy.md").read_text("utf-8")
ADDRESS = "127.0.0.1:8000"


@pytest.mark.parametrize("example", python_examples(PAGE), ids=range(len(python_examples(PAGE))))
def test_example_of_the_lmdeploy_page_runs(gateway: Endpoints, example: str) -> None:
    run_example(example, ADDRESS, gateway.http)


def test_page_names_every_field() -> None:
    names = [field.name for kind in (GenerationConfig, Response) for field in fields(kind)]

    assert [name for name in names if f"`{name}`" not in PAGE] == []
