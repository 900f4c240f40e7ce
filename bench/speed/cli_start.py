"""CPU seconds of a command: the least of several runs, each in a new process, without a swarm.

User and system time of the process. Other work on the machine only adds to it, so the least is the best estimate.
`python -c pass` is the share of the interpreter.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness import Bar, Result

RUNS = 15
BAR_SECONDS = 0.3
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "counting.yaml")
COMMANDS = {
    "help": ("--help",),
    "status_help": ("status", "--help"),
    "completion": ("completion", "bash"),
    "status": ("status", "--admin", "127.0.0.1:1"),
    "status_json": ("status", "--admin", "127.0.0.1:1", "--json"),
    "generate": ("generate", "x", "--url", "http://127.0.0.1:1"),
    "plan": ("plan", EXAMPLE),
    "plan_json": ("plan", EXAMPLE, "--json"),
}  # addresses without listeners: every import happens, and no command waits for an answer


def run() -> Result:
    lines = {name: ("-m", "modelswarm.cli", *arguments) for name, arguments in COMMANDS.items()}
    lines["interpreter"] = ("-c", "pass")
    with tempfile.TemporaryDirectory() as runtime:
        env = {**os.environ, "XDG_RUNTIME_DIR": runtime}
        rounds = [
            {name: _cpu_seconds(line, env) for name, line in lines.items()} for _ in range(RUNS)
        ]
    figures = {name: min(one[name] for one in rounds) for name in lines}
    return Result(
        name="cli_start",
        figures=figures,
        columns=("command", "CPU seconds"),
        rows=[(" ".join(lines[name][1:]), f"{value:.3f}") for name, value in figures.items()],
        shape=f"least of {RUNS} processes each",
        threads=1,
        bars=[Bar(name, "<=", BAR_SECONDS) for name in COMMANDS],
    )


def _cpu_seconds(line: tuple[str, ...], env: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        (sys.executable, *line),
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
