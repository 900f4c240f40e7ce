"""The notebooks of examples/: their cells run in order, and print what the demo model says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes.swarm import Running

NOTEBOOKS = Path(__file__).parents[4] / "examples"
SECONDS = 300

# Runs the code cells of a notebook in one namespace, inside a running event loop, as Jupyter's kernel does.
PROGRAM = """
import ast, asyncio, inspect, json, sys

with open(sys.argv[1], encoding="utf-8") as file:
    cells = json.load(file)["cells"]
names = {"__name__": "__main__"}


async def run_cells():
    for place, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            source, flags = "".join(cell["source"]), ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            made = eval(compile(source, f"cell {place}", "exec", flags=flags), names)
            if inspect.isawaitable(made):
                await made


asyncio.run(run_cells())
"""


def read_cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((NOTEBOOKS / name).read_text("utf-8"))["cells"]
    return found


def run_notebook(name: str, gateway: str = "") -> str:
    """Run the notebook in a process of its own; return what it prints."""
    environment = os.environ | {"MODELSWARM_GATEWAY": gateway, "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(NOTEBOOKS / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: str(path.name))
def test_notebook_has_no_outputs(path: Path) -> None:
    cells = read_cells(path.name)
    assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.full
def test_chat_notebook_runs(counting: Running) -> None:
    counting.wait_whole()
    lines = run_notebook("chat.ipynb", counting.local.grpc).splitlines()
    assert lines[0].startswith("97 98 99 100 101")
    assert lines[1] == "I am a small demo model served by ModelSwarm."
    assert lines[2] == " ".join(map(str, range(1, 31)))
    assert lines[4:] == ["3 + 4 = 7.", "The capital of France is Paris."]
    counting.wait_empty()


@pytest.mark.full
def test_batch_notebook_runs() -> None:
    lines = run_notebook("batch.ipynb").splitlines()
    sums = [f"What is {number} + 7? -> {number} + 7 = {number + 7}." for number in range(12)]
    assert lines[:12] == sums
    assert lines[12] == " ".join(map(str, range(1, 61)))
    assert lines[14] == "I am a small demo model served by ModelSwarm."
    assert lines[15].startswith("error ")
    assert lines[16:] == ["The capital of France is Paris.", "The sky is blue."]
