"""The problems of a swarm, each as a reason and a sentence that the user can act on.

Collected once per turn by `serving_swarm` and `reconciler`; `condition_rules` shows the most important ones. Decides
nothing. Sentences are stable: the same problem has the same words, otherwise status would be written for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelswarm_operator.reconcile.pods.inventory import NodeState, PodInventory, Server
from modelswarm_operator.reconcile.state.policy import Policy

_MAX_MESSAGE = 500  # characters of a message from the API server, kubelet, scheduler or server


@dataclass(frozen=True, slots=True)
class Problem:
    reason: str  # CamelCase
    message: str
    where: str = ""  # pod or slot: equal problems of several are reported once


PRIORITY = (
    "InvalidSpec",
    "DecisionTooLong",
    "ServedNameTaken",
    "ModelRefused",
    "InspectionFailed",
    "WeightsFailed",
    "DeviceUnusable",
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
"""Most important first: what must be changed before anything else can help."""


def priority_of(problem: Problem) -> int:
    return PRIORITY.index(problem.reason) if problem.reason in PRIORITY else len(PRIORITY)


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…"


def last_line(text: str) -> str:
    """Return the last line that is not empty: there servers and Python say what went wrong."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def node_problems(
    inventory: PodInventory, policy: Policy, now: float, drain_timeout: float
) -> list[Problem]:
    found = []
    if inventory.mass_outage is not None and any(
        one.node_state is NodeState.UNREADY for one in inventory.servers
    ):
        down, nodes = inventory.mass_outage
        message = (
            f"{down} of {nodes} nodes are not ready at the same time. That looks like a fault of the control plane, "
            f"so their servers are not replaced for {policy.mass_outage_timeout:.0f} s."
        )
        found.append(Problem("ManyNodesNotReady", message))
    lost = sorted(
        {
            one.pod.node
            for one in inventory.servers
            if one.node_state is NodeState.UNREACHABLE and one.is_alive
        }
    )
    if lost:
        message = (
            f"Servers were on nodes that are not ready: {_some_names(lost)}. They are replaced."
        )
        found.append(Problem("NodeNotReady", message))
    stuck = [
        one.pod.name for one in inventory.servers if now >= _stuck_at(one, policy, drain_timeout)
    ]
    if stuck:
        message = (
            f"Pods do not end: {_some_names(sorted(stuck))}. Their slots have new servers. If their node is really "
            "down, "
            "delete the Node or taint it with node.kubernetes.io/out-of-service=nodeshutdown:NoExecute; then they "
            "are removed."
        )
        found.append(Problem("StuckTerminating", message))
    return found


def next_stuck_at(
    servers: Iterable[Server], policy: Policy, now: float, drain_timeout: float
) -> float | None:
    """Return the time at which the next terminating pod begins to count as stuck."""
    moments = [_stuck_at(one, policy, drain_timeout) for one in servers if one.is_terminating]
    return min((moment for moment in moments if moment > now), default=None)


def _stuck_at(server: Server, policy: Policy, drain_timeout: float) -> float:
    """A pod may have a longer grace period than the spec says now, which is that of its creation."""
    since, until = server.pod.deleting_since, server.pod.deleting_until or 0.0
    return math.inf if since is None else max(since + drain_timeout, until) + policy.stuck_after


def rejection(what: str, cause: str) -> Problem:
    message = (
        f"{what} is refused by the API server: {shorten(cause)}. It is retried with growing pauses."
    )
    return Problem("CreateRefused", message, what)


def _some_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def summarize(problems: Sequence[Problem]) -> tuple[str, str]:
    """Return the reason of the most important problem and the sentences of up to three different ones."""
    ordered = sorted(problems, key=lambda problem: (priority_of(problem), problem.where))
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
