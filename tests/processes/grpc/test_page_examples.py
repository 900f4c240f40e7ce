"""The Python examples of the gRPC section of docs/api.md run as they are, against a real swarm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.swarm import Endpoints

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## gRPC (port 8001)\n")[1].split("\n## ")[0]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
ADDRESS = "127.0.0.1:8001"


def test_section_has_an_example_for_each_part() -> None:
    assert len(EXAMPLES) == 1 + SECTION.count("\n### ")


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_of_the_grpc_section_runs(endpoints: Endpoints, example: str) -> None:
    assert ADDRESS in example
    script = example.replace(ADDRESS, endpoints.grpc)
    made = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
