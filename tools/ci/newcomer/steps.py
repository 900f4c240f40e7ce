"""The README's commands: how a newcomer runs each, and what its output has to show. Pure.

A command of the README without a step here is an error, so a new one cannot stay untried.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from tools.ci.newcomer.checks import Check, check_demo, check_stream, has
from tools.ci.newcomer.readme import Command


class Way(enum.Enum):
    """The way to run a command."""

    RUN = "run"
    RUN_AS_ROOT = "run as root"
    START = "start in a terminal of its own"
    TALK = "type into it"
    ELSEWHERE = "not in the container"


ANY_OUTPUT = has()


@dataclass(frozen=True, slots=True)
class Step:
    beginning: str  # of the commands that it stands for
    way: Way = Way.RUN
    check: Check = ANY_OUTPUT
    seconds: float = 120.0  # until it must have ended, on a slow machine
    has_network: bool = False  # all other steps run without any network but loopback
    ends_swarm: bool = False  # Ctrl-C in the terminal of `up` comes before it
    is_needed: bool = False  # without it the rest of the walk says nothing
    reason: str = ""  # why it runs elsewhere, and where


QUICKSTART = "runs on the host, word for word: tests/cluster/real/test_quickstart.py"
SLOW = 3600.0  # downloads of some gigabytes, on any line
STEPS = (
    Step("apt-get install ", Way.RUN_AS_ROOT, seconds=SLOW, has_network=True, is_needed=True),
    Step("make demo", check=check_demo, seconds=SLOW, has_network=True, is_needed=True),
    Step(
        ".venv/bin/modelswarm up ",
        Way.START,
        has("ready: counting at http://127.0.0.1:8000/v1"),
        seconds=600.0,
        is_needed=True,
    ),
    Step(".venv/bin/modelswarm chat", Way.TALK, seconds=300.0),
    Step(".venv/bin/modelswarm drain ", check=has("counting-s0-r0: empty")),
    Step("make test", Way.ELSEWHERE, reason="CI runs it in a fresh clone: .ci/run"),
    Step(".venv/bin/modelswarm plan ", check=has("0:4", "4:8", "free KV tokens")),
    Step(".venv/bin/modelswarm generate ", check=has("100 101")),
    Step(".venv/bin/modelswarm status", check=has("counting-s0-r0", "0:4", "4:8", "ready")),
    Step(".venv/bin/modelswarm routes", check=has("Costs of a hop", "counting-s1-r1")),
    Step(".venv/bin/modelswarm logs", check=has("logs of counting", "== gateway")),
    Step("curl http://127.0.0.1:8000/", check=check_stream),
    Step("make cluster", Way.ELSEWHERE, reason=QUICKSTART),
    Step("export KUBECONFIG", Way.ELSEWHERE, reason=QUICKSTART),
    Step("kubectl ", Way.ELSEWHERE, reason=QUICKSTART),
    Step("helm ", Way.ELSEWHERE, reason=QUICKSTART),
    Step("make chaos", seconds=1200.0, ends_swarm=True),
)


class UnknownCommandError(ValueError):
    """The README has a command without a step."""


def plan_walk(commands: Iterable[Command]) -> list[tuple[Command, Step]]:
    """Return the step of every command, in the README's order."""
    planned = []
    for command in commands:
        found = [step for step in STEPS if command.text.startswith(step.beginning)]
        if not found:
            raise UnknownCommandError(
                f"README, {command.section!r}: {command.text!r} has no step in the newcomer's walk; "
                "add one to tools/ci/newcomer/steps.py"
            )
        planned.append((command, max(found, key=lambda step: len(step.beginning))))
    return planned
