"""What is wrong with a swarm, each thing as a reason and a sentence that a person can act on.

Called once per turn by `reconcile`; `conditions` shows the most important ones. Reads what was observed, decides
nothing. Sentences are stable: the same trouble is told in the same words, or status would be written for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelswarm_operator.reconcile.pods.inventory import PodInventory, NodeState, Server
from modelswarm_operator.reconcile.state.policy import Policy

_LONGEST = 500  # characters of somebody else's message


@dataclass(frozen=True, slots=True)
class Problem:
    reason: str  # CamelCase
    message: str
    where: str = ""  # pod or slot: equal problems of many are told once


ORDER = (
    "InvalidSpec",
    "ServedNameTaken",
    "ModelRefused",
    "InspectionFailed",
    "WeightsFailed",
    "OutOfMemory",
    "ImagePullFailed",
    "ConfigurationFailed",
    "VolumeMissing",
    "CreateRefused",
    "NoCapacity",
    "RestartBudgetUsedUp",
    "Crashing",
    "NotStarting",
    "ServersFailing",
    "ManyNodesNotReady",
    "NodeNotReady",
    "StuckTerminating",
    "SpanUncovered",
    "PodTemplateReserved",
)
"""Most important first: what a person must change before anything else can help."""


def rank_of(problem: Problem) -> int:
    return ORDER.index(problem.reason) if problem.reason in ORDER else len(ORDER)


def cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def last_line(text: str) -> str:
    """Of the end of a log: where a server says its last words, and Python what went wrong."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def node_problems(fleet: PodInventory, policy: Policy, now: float, drain_limit: float) -> list[Problem]:
    found = []
    if fleet.mass_outage is not None and any(one.node_state is NodeState.UNREADY for one in fleet.servers):
        down, nodes = fleet.mass_outage
        said = (
            f"{down} of {nodes} nodes are not ready at the same time. That looks like trouble of the control plane, "
            f"so their servers are not replaced for {policy.mass_patience:.0f} s."
        )
        found.append(Problem("ManyNodesNotReady", said))
    lost = sorted(
        {one.pod.node for one in fleet.servers if one.node_state is NodeState.UNREACHABLE and one.is_alive}
    )
    if lost:
        said = f"Servers were on nodes that are not ready: {_some(lost)}. They are replaced."
        found.append(Problem("NodeNotReady", said))
    stuck = [one.pod.name for one in fleet.servers if now >= _stuck_at(one, policy, drain_limit)]
    if stuck:
        said = (
            f"Pods do not end: {_some(sorted(stuck))}. Their slots have new servers. If their node is really down, "
            "delete the Node or taint it with node.kubernetes.io/out-of-service=nodeshutdown:NoExecute; then they "
            "are removed."
        )
        found.append(Problem("StuckTerminating", said))
    return found


def stuck_at(
    servers: Iterable[Server], policy: Policy, now: float, drain_limit: float
) -> float | None:
    """When the next ending pod begins to count as stuck."""
    moments = [_stuck_at(one, policy, drain_limit) for one in servers if one.is_terminating]
    return min((moment for moment in moments if moment > now), default=None)


def _stuck_at(server: Server, policy: Policy, drain_limit: float) -> float:
    since = server.pod.deleting_since
    return math.inf if since is None else since + drain_limit + policy.stuck_after


def refusal(what: str, words: str) -> Problem:
    said = (
        f"{what} is refused by the API server: {cut(words)}. It is tried again with growing pauses."
    )
    return Problem("CreateRefused", said, what)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def summary(problems: Sequence[Problem]) -> tuple[str, str]:
    """Reason of the most important problem, and the sentences of up to three different ones."""
    ordered = sorted(problems, key=lambda problem: (rank_of(problem), problem.where))
    first_of: dict[str, Problem] = {}
    counts: dict[str, int] = {}
    for problem in ordered:
        first_of.setdefault(problem.reason, problem)
        counts[problem.reason] = counts.get(problem.reason, 0) + 1
    sentences = []
    for problem in list(first_of.values())[:3]:
        more = counts[problem.reason] - 1
        also = f" ({more} more like this)" if more else ""
        sentences.append(f"{problem.message}{also}")
    if len(first_of) > 3:
        sentences.append(f"Also: {', '.join(list(first_of)[3:])}.")
    return ordered[0].reason, " ".join(sentences)
