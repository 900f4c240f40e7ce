"""Why a pod does not get on: what scheduler, kubelet and the server itself say, and what a person can do about it.

Called by `upkeep` for servers and by `inspection` for its own pod. A pod that just starts is no problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from modelswarm.checkpoint.inspection import REFUSED
from modelswarm_operator.reconcile.pods.inventory import Server
from modelswarm_operator.reconcile.state.observed import ContainerView, NodeView, PodView
from modelswarm_operator.reconcile.state.turn import Turn
from modelswarm_operator.reconcile.status.problems import Problem, last_line, shorten

_IMAGE_ERRORS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
_CONFIG_ERRORS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
_INSUFFICIENT = re.compile(r"(\d+) Insufficient ([^\s,]+[^\s,.])")
_NODES = re.compile(r"0/(\d+) nodes")
_CLAIM_PROBLEM = re.compile(r"persistentvolumeclaim \"?([^\s\"]+)\"? (not found|is being deleted)")


@dataclass(frozen=True, slots=True)
class PodDiagnosis:
    """Knows what sentences need beside the pod."""

    turn: Turn
    nodes: Mapping[str, NodeView] | None
    memory_limits: Mapping[str, str]  # by pool

    def diagnose_servers(self, servers: Iterable[Server]) -> list[Problem]:
        """Of pods that should serve and don't."""
        found = []
        for server in servers:
            if (
                server.is_alive
                and not server.pod.ready
                and server.pod.name not in self.turn.deletes
            ):
                limit = self.memory_limits.get(server.pool, "")
                if problem := self.diagnose_pod(server.pod, f"blocks {server.blocks}", limit):
                    found.append(problem)
        return found

    def diagnose_pod(self, pod: PodView, what: str, memory_limit: str = "") -> Problem | None:
        """Why this pod does not get on; None: it is starting, as far as one can see."""
        who, container = f"Pod {pod.name} ({what})", pod.container
        if pod.unschedulable:
            return _scheduling_problem(pod, who, self.nodes)
        if container.waiting in _IMAGE_ERRORS:
            told = shorten(container.waiting_message or container.waiting)
            said = (
                f"{who} can't get its image: {told}. Check the image's name and the registry's credentials "
                "(imagePullSecrets in the pool's podTemplate)."
            )
            return Problem("ImagePullFailed", said, pod.name)
        if container.waiting in _CONFIG_ERRORS:
            told = shorten(container.waiting_message or container.waiting)
            return Problem("ConfigurationFailed", f"{who} can't start: {told}.", pod.name)
        return _crash_problem(pod, container, who, memory_limit) or self._slow_start_problem(
            pod, who
        )

    def _slow_start_problem(self, pod: PodView, who: str) -> Problem | None:
        policy, now = self.turn.policy, self.turn.now
        late = max(pod.created, pod.container.running_since or 0.0) + policy.slow_start
        if now < late:
            self.turn.requeue_at(late)
            return None
        said = (
            f"{who} is not ready after {policy.slow_start / 60:.0f} minutes. Weights that are large may take that "
            f"long; otherwise `kubectl describe pod {pod.name}` and its log say more."
        )
        return Problem("NotStarting", said, pod.name)


def _crash_problem(pod: PodView, container: ContainerView, who: str, limit: str) -> Problem | None:
    if container.exit_code is None:
        return None
    if container.exit_reason == "OOMKilled":
        within = f"its memory limit of {limit}" if limit else "the memory of its node"
        said = (
            f"{who} was killed for using more than {within}. Raise the pool's resources.limits.memory, use more "
            "spans, or lower sessions.concurrent or maxLength."
        )
        return Problem("OutOfMemory", said, pod.name)
    if container.exit_code == 0 and not container.waiting:
        return None
    words = shorten(last_line(container.exit_message) or container.exit_reason or "no message")
    if container.exit_code == REFUSED:  # the server's own refusal: its flags or its weights
        return Problem("WeightsFailed", f"{who} can't load its blocks: {words}", pod.name)
    said = f"{who} crashed with exit code {container.exit_code} ({container.restarts} restarts): {words}"
    return Problem("Crashing", said, pod.name)


def _scheduling_problem(pod: PodView, who: str, nodes: Mapping[str, NodeView] | None) -> Problem:
    told = shorten(pod.unschedulable)
    if claim := _CLAIM_PROBLEM.search(pod.unschedulable):
        said = (
            f"{who} waits for the volume claim {claim[1]}: {told}. Create the claim in the swarm's namespace or "
            "correct spec.model.source."
        )
        return Problem("VolumeMissing", said, pod.name)
    return Problem(
        "NoCapacity",
        f"{who} finds no node. {_describe_shortage(pod.unschedulable, nodes)}The scheduler says: {told}",
        pod.name,
    )


def _describe_shortage(message: str, nodes: Mapping[str, NodeView] | None) -> str:
    """Which resource on how many nodes, and whether any node has it at all."""
    short = _INSUFFICIENT.findall(message)
    if not short:
        return ""
    lacking = " and ".join(f"{number} have too little {resource}" for number, resource in short)
    total = _NODES.search(message)
    said = f"Of {total[1] if total else 'the'} nodes, {lacking}. "
    for _, resource in short:
        if nodes and all(node.allocatable.get(resource, "0") == "0" for node in nodes.values()):
            said += f"No node offers {resource} at all. "
    return said
