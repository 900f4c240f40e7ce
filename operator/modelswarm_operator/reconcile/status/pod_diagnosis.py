"""Diagnosis of pods that do not become ready: messages of scheduler, kubelet and server become advice for the user.

Called by `serving_swarm` for servers and by `inspection` for its own pod. A pod that has just started is no problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modelswarm.checkpoint.inspection import REFUSED
from modelswarm.errors import DeviceError, MemoryLimitError
from modelswarm_operator.reconcile.pods.inventory import NodeState, Server
from modelswarm_operator.reconcile.state.observed import ContainerView, NodeView, PodView
from modelswarm_operator.reconcile.state.turn import Turn
from modelswarm_operator.reconcile.status.memory_advice import MemoryAdvice
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
    """Finds the problems of pods; holds what the sentences need beside the pod."""

    turn: Turn
    nodes: Mapping[str, NodeView] | None
    memory: MemoryAdvice = field(default_factory=MemoryAdvice)

    def diagnose_servers(self, servers: Iterable[Server]) -> list[Problem]:
        """Return the problems of pods that should serve and do not; that of an unready node is not its pods'."""
        found = []
        for server in servers:
            if (
                server.is_alive
                and not server.pod.ready
                and server.node_state not in (NodeState.UNREADY, NodeState.UNREACHABLE)
                and server.pod.name not in self.turn.deletes
            ):
                blocks = f"blocks {server.blocks}"
                if problem := self.diagnose_pod(server.pod, blocks, server.pool):
                    found.append(problem)
        return found

    def diagnose_pod(self, pod: PodView, what: str, pool: str = "") -> Problem | None:
        """Return the reason why this pod is not ready; None while it seems to be starting."""
        subject, container = f"Pod {pod.name} ({what})", pod.container
        if pod.unschedulable:
            return _scheduling_problem(pod, subject, self.nodes)
        if container.waiting in _IMAGE_ERRORS:
            detail = shorten(container.waiting_message or container.waiting)
            message = (
                f"{subject} can't get its image: {detail}. Check the image's name and the registry's credentials "
                "(imagePullSecrets in the pool's podTemplate)."
            )
            return Problem("ImagePullFailed", message, pod.name)
        if container.waiting in _CONFIG_ERRORS:
            detail = shorten(container.waiting_message or container.waiting)
            return Problem("ConfigurationFailed", f"{subject} can't start: {detail}.", pod.name)
        crash = _crash_problem(pod, container, subject, self.memory, pool)
        return crash or self._slow_start_problem(pod, subject)

    def _slow_start_problem(self, pod: PodView, subject: str) -> Problem | None:
        policy, now = self.turn.policy, self.turn.now
        started = pod.container.running_since or 0.0
        late = max(pod.created, started, pod.unready_since or 0.0) + policy.slow_start
        if now < late:
            self.turn.requeue_at(late)
            return None
        message = (
            f"{subject} is not ready after {policy.slow_start / 60:.0f} minutes. Weights that are large may take that "
            f"long; otherwise see `kubectl describe pod {pod.name}` and its log."
        )
        return Problem("NotStarting", message, pod.name)


def _crash_problem(
    pod: PodView, container: ContainerView, subject: str, memory: MemoryAdvice, pool: str
) -> Problem | None:
    if container.exit_code is None:
        return None
    if container.exit_reason == "OOMKilled":
        message = f"{subject} was killed for using more than {memory.explain_kill(pool)}"
        return Problem("OutOfMemory", message, pod.name)
    if container.exit_code == 0 and not container.waiting:
        return None
    detail = shorten(last_line(container.exit_message) or container.exit_reason or "no message")
    if container.exit_code == MemoryLimitError.exit_code:  # it compared its plan with its limit
        return Problem("OutOfMemory", f"{subject} does not fit into its memory: {detail}", pod.name)
    if container.exit_code == DeviceError.exit_code:
        return Problem("DeviceUnusable", f"{subject} can't use its device: {detail}", pod.name)
    if container.exit_code == REFUSED:  # the server rejected its flags or its weights
        return Problem("WeightsFailed", f"{subject} can't load its blocks: {detail}", pod.name)
    message = f"{subject} crashed with exit code {container.exit_code} ({container.restarts} restarts): {detail}"
    return Problem("Crashing", message, pod.name)


def _scheduling_problem(
    pod: PodView, subject: str, nodes: Mapping[str, NodeView] | None
) -> Problem:
    detail = shorten(pod.unschedulable)
    if claim := _CLAIM_PROBLEM.search(pod.unschedulable):
        message = (
            f"{subject} waits for the volume claim {claim[1]}: {detail}. Create the claim in the swarm's namespace or "
            "correct spec.model.source."
        )
        return Problem("VolumeMissing", message, pod.name)
    return Problem(
        "NoCapacity",
        f"{subject} finds no node. {_describe_shortage(pod.unschedulable, nodes)}Message of the scheduler: {detail}",
        pod.name,
    )


def _describe_shortage(message: str, nodes: Mapping[str, NodeView] | None) -> str:
    """Return the missing resources, on how many nodes, and a hint if no node has one at all."""
    short = _INSUFFICIENT.findall(message)
    if not short:
        return ""
    lacking = " and ".join(f"{number} have too little {resource}" for number, resource in short)
    total = _NODES.search(message)
    text = f"Of {total[1] if total else 'the'} nodes, {lacking}. "
    for _, resource in short:
        if nodes and all(node.allocatable.get(resource, "0") == "0" for node in nodes.values()):
            text += f"No node offers {resource} at all. "
    return text
