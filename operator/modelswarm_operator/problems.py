"""What is wrong with a swarm, each thing as a reason and a sentence that a person can act on.

Called once per turn by `reconcile`; `conditions` shows the most important ones. Reads what was observed, decides
nothing. Sentences are stable: the same trouble is told in the same words, or status would be written for ever.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelswarm_operator.fleet import Fleet, Ground, Server
from modelswarm_operator.policy import Policy
from modelswarm_operator.world import ContainerView, PodView

_LONGEST = 500  # characters of somebody else's message
_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_INSUFFICIENT = re.compile(r"(\d+) Insufficient ([^\s,]+[^\s,.])")
_NODES = re.compile(r"0/(\d+) nodes")
_CLAIM = re.compile(r"persistentvolumeclaim \"?([^\s\"]+)\"? (not found|is being deleted|bound)")


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


def pod_problems(servers: Iterable[Server], memory_limits: dict[str, str]) -> list[Problem]:
    """Of pods that should serve and don't. `memory_limits`: by pool."""
    found = []
    for server in servers:
        if server.alive and not server.pod.ready:
            limit = memory_limits.get(server.pool, "")
            if problem := pod_problem(server.pod, f"blocks {server.blocks}", limit):
                found.append(problem)
    return found


def pod_problem(pod: PodView, what: str, memory_limit: str = "") -> Problem | None:
    """Why this pod does not get on; None: it is starting, as far as one can see."""
    if pod.unschedulable:
        return _unscheduled(pod, what)
    container = pod.container
    if container.waiting in _IMAGE:
        told = cut(container.waiting_message or container.waiting)
        return Problem(
            "ImagePullFailed",
            f"Pod {pod.name} ({what}) can't get its image: {told}. Check the image's name and the registry's "
            "credentials (imagePullSecrets in the pool's podTemplate).",
            pod.name,
        )
    if container.waiting in _CONFIG:
        told = cut(container.waiting_message or container.waiting)
        return Problem(
            "ConfigurationFailed", f"Pod {pod.name} ({what}) can't start: {told}.", pod.name
        )
    return _crashed(pod, container, what, memory_limit) if container.exit_code is not None else None


def _crashed(pod: PodView, container: ContainerView, what: str, limit: str) -> Problem | None:
    if container.exit_reason == "OOMKilled":
        within = f"its memory limit of {limit}" if limit else "the memory of its node"
        return Problem(
            "OutOfMemory",
            f"Pod {pod.name} ({what}) was killed for using more than {within}. Raise the pool's "
            "resources.limits.memory, use more spans, or lower sessions.concurrent or maxLength.",
            pod.name,
        )
    if container.exit_code == 0 and not container.waiting:
        return None
    words = cut(container.exit_message or container.exit_reason or "no message")
    if container.exit_code == 2:  # the server's own refusal: flags or model, see its main
        return Problem(
            "WeightsFailed", f"Pod {pod.name} ({what}) can't load its blocks: {words}", pod.name
        )
    if container.waiting == "CrashLoopBackOff" or container.restarts > 0:
        return Problem(
            "Crashing",
            f"Pod {pod.name} ({what}) crashed with exit code {container.exit_code} "
            f"({container.restarts} restarts): {words}",
            pod.name,
        )
    return None


def _unscheduled(pod: PodView, what: str) -> Problem:
    told = cut(pod.unschedulable)
    if claim := _CLAIM.search(pod.unschedulable):
        return Problem(
            "VolumeMissing",
            f"Pod {pod.name} ({what}) waits for the volume claim {claim[1]}: {told}. Create the claim in the "
            "swarm's namespace or correct spec.model.source.",
            pod.name,
        )
    short = _INSUFFICIENT.findall(pod.unschedulable)
    lacking = " and ".join(f"{number} have too little {resource}" for number, resource in short)
    nodes = _NODES.search(pod.unschedulable)
    why = f"Of {nodes[1] if nodes else 'the'} nodes, {lacking}. " if lacking else ""
    return Problem(
        "NoCapacity",
        f"Pod {pod.name} ({what}) finds no node. {why}The scheduler says: {told}",
        pod.name,
    )


def node_problems(fleet: Fleet, policy: Policy, now: float, drain_limit: float) -> list[Problem]:
    found = []
    if fleet.mass is not None:
        down, nodes = fleet.mass
        said = (
            f"{down} of {nodes} nodes are not ready at the same time. That looks like trouble of the control plane, "
            f"so their servers are not replaced for {policy.mass_patience:.0f} s."
        )
        found.append(Problem("ManyNodesNotReady", said))
    lost = sorted(
        {one.pod.node for one in fleet.servers if one.ground is Ground.LOST and one.alive}
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
    moments = [_stuck_at(one, policy, drain_limit) for one in servers if one.leaving]
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
