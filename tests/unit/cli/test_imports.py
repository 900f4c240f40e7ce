"""Commands import only what they need: a heavy module delays every answer by a tenth of a second or more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "examples" / "counting.yaml")
NEVER = {"fastapi", "huggingface_hub", "kubernetes", "numpy", "torch", "transformers", "uvicorn"}
LIBRARIES = {"google.protobuf", "grpc", "httpx", "jinja2", "pydantic", "rich", "tokenizers", "yaml"}
COMMANDS = (
    "batch",
    "chat",
    "completion",
    "convert",
    "demo",
    "drain",
    "generate",
    "logs",
    "plan",
    "routes",
    "sessions",
    "status",
    "ui",
    "up",
)
PROGRAM = """
import json, sys
from modelswarm.cli import run
for line in json.loads(sys.argv[1]):
    run(line)
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def imported(runtime: Path, *lines: list[str]) -> set[str]:
    """Return the modules of a process that runs these command lines in turn."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)],
        env={"XDG_RUNTIME_DIR": str(runtime), "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stderr.splitlines()[-1])
    return set(modules)


def test_help_of_every_command_imports_no_library(tmp_path: Path) -> None:
    lines = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]

    assert imported(tmp_path, *lines) & (NEVER | LIBRARIES) == set()


def test_commands_without_a_swarm_import_no_library(tmp_path: Path) -> None:
    lines = [["completion", "zsh"], ["status"], ["chat"], ["routes"], ["drain", "x"], ["logs"]]

    assert imported(tmp_path, *lines) & (NEVER | LIBRARIES) == set()


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        (["plan", EXAMPLE, "--json"], {"pydantic", "yaml"}),
        (["plan", EXAMPLE], {"pydantic", "yaml", "rich"}),
        (["status", "--admin", "127.0.0.1:1", "--json"], {"grpc", "google.protobuf"}),
        (["routes", "--admin", "127.0.0.1:1", "--json"], {"grpc", "google.protobuf"}),
        (["drain", "x", "--admin", "127.0.0.1:1"], {"grpc", "google.protobuf"}),
        (["generate", "x", "--url", "http://127.0.0.1:1", "--json"], {"httpx"}),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else "",
)
def test_command_imports_only_its_libraries(
    tmp_path: Path, line: list[str], needed: set[str]
) -> None:
    found = imported(tmp_path, line)

    # httpx draws its own --help with rich, if installed.
    optional = {"rich"} if "httpx" in needed else set()
    assert found & (NEVER | LIBRARIES) - optional == needed
