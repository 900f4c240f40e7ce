"""Inspection of a model by a pod that sees its weights; the result is kept in status.

Called once per turn while the model is not known. One pod runs at a time. A failure is reported with the pod's own
message and retried later, or at once when the user changes anything the pod is made from. Plans no spans.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from modelswarm.checkpoint.inspection import REFUSED as EXIT_REFUSED
from modelswarm.errors import UserError
from modelswarm.resources.accelerators import without_devices
from modelswarm.resources.spec import Pool, Spec
from modelswarm.resources.status import ModelStatus
from modelswarm_operator.reconcile.manifests.manifests import ManifestBuilder, inspection_pod
from modelswarm_operator.reconcile.manifests.pod_template import apply_patches, patches_of
from modelswarm_operator.reconcile.model.facts import parse_inspection
from modelswarm_operator.reconcile.model.span_plan import DEFAULT_POOL
from modelswarm_operator.reconcile.pods.inventory import PodInventory, incarnation_of_pod
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import Json, Observed, PodView
from modelswarm_operator.reconcile.state.turn import REJECTED_PREFIX, Turn
from modelswarm_operator.reconcile.status.pod_diagnosis import PodDiagnosis
from modelswarm_operator.reconcile.status.problems import Problem, rejection, shorten

_UNFIT_PREFIX = "unfit: "  # begins the failure message of a model that the inspection rejected
_OF_SERVERS = ("ports", "startupProbe", "livenessProbe", "readinessProbe")


@dataclass(frozen=True, slots=True)
class InspectionResult:
    model: ModelStatus | None
    problems: tuple[Problem, ...]


def end_inspections(inventory: PodInventory, turn: Turn, keep_slot: str = "") -> None:
    """Delete inspection pods and their failures, except those of `keep_slot`."""
    for pod in inventory.inspections:
        if not keep_slot or _inspection_slot(pod) != keep_slot:
            turn.delete_pod(pod, "its inspection is not needed any more")
    for slot in [slot for slot in turn.slots if slot.startswith(names.INSPECT_SLOT)]:
        if slot != keep_slot:
            turn.slots.pop(slot)


def inspect_swarm_model(
    observed: Observed, builder: ManifestBuilder, spec: Spec, inventory: PodInventory, turn: Turn
) -> InspectionResult:
    return _Inspection(observed, builder, spec, inventory, turn).advance()


class _Inspection:
    def __init__(
        self,
        observed: Observed,
        builder: ManifestBuilder,
        spec: Spec,
        inventory: PodInventory,
        turn: Turn,
    ) -> None:
        self._builder, self._spec, self._inventory, self._turn = builder, spec, inventory, turn
        self._pools = spec.pools or (DEFAULT_POOL,)
        self._slot = self._slot_name()
        self._rejection = observed.rejected.get(self._slot, "")
        self._diagnosis = PodDiagnosis(turn, observed.nodes)
        mine = (pod for pod in inventory.inspections if _inspection_slot(pod) == self._slot)
        self._pods = sorted(mine, key=incarnation_of_pod)

    def _slot_name(self) -> str:
        """Return a name made from all inputs of the pod, so that a corrected document starts without failures."""
        parts = (self._spec.model, *self._pools)
        text = "".join(part.model_dump_json(by_alias=True, exclude_defaults=True) for part in parts)
        return f"{names.INSPECT_SLOT}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def advance(self) -> InspectionResult:
        end_inspections(self._inventory, self._turn, keep_slot=self._slot)
        if self._pods and _has_ended(self._pods[-1]):
            known = self._read_result(self._pods[-1])
            if known is not None:
                end_inspections(self._inventory, self._turn)
                message = f"{known.source}: {known.family}, {known.blocks} blocks"
                self._turn.record_event("Normal", "ModelFound", message)
                return InspectionResult(known, ())
        self._ensure_pod()
        return InspectionResult(None, tuple(self._find_problems()))

    def _read_result(self, pod: PodView) -> ModelStatus | None:
        try:
            return _result_of(self._spec, pod)
        except UserError as error:
            self._turn.delete_pod(pod, "its inspection failed")
            # With a successor in flight it was counted before: it could not be deleted.
            if not self._turn.is_in_flight(self._slot):
                self._turn.record_failure(self._slot, error.message)
                self._turn.allocate(self._slot)
            return None

    def _ensure_pod(self) -> None:
        turn, slot = self._turn, self._slot
        for pod in self._pods:
            if pod.name in self._inventory.unreachable:
                turn.delete_pod(pod, "its node is not ready")
        working = [pod for pod in self._pods if _is_running(pod) and pod.name not in turn.deletes]
        for pod in working[:-1]:
            turn.delete_pod(pod, "a later inspection runs")
        if working and not self._leave_full_pool(working[-1]):
            return
        if not turn.is_in_flight(slot):
            turn.allocate(slot)
        turn.create_due(slot, self._rejection, self._build_pod)

    def _leave_full_pool(self, pod: PodView) -> bool:
        """Delete the pod if it waited too long for a node of its pool and there is another pool."""
        if len(self._pools) < 2 or not pod.unschedulable:
            return False
        moment = pod.created + self._turn.policy.pool_timeout
        if self._turn.now < moment:
            self._turn.requeue_at(moment)
            return False
        self._turn.delete_pod(pod, "its pool has no room; another is tried")
        return True

    def _next_pool(self) -> Pool:
        """Return the pool of the last pod, or the one after it if that has no room; at first the first one."""
        for pod in self._pods[-1:]:
            for index, pool in enumerate(self._pools):
                if pool.name == pod.annotations.get(names.POOL):
                    return self._pools[(index + bool(pod.unschedulable)) % len(self._pools)]
        return self._pools[0]

    def _build_pod(self, incarnation: int) -> Json:
        address, pool = self._spec.model.address, self._next_pool()
        pod = inspection_pod(self._builder, self._spec, pool, address, self._slot, incarnation)
        patches = patches_of(self._spec, pool, self._builder.policy.pod_template)
        pod = apply_patches(pod, patches)[0]
        body = without_devices(pod["spec"])  # servers may have all devices
        return {**pod, "spec": _without_parts_of_servers(body)}

    def _find_problems(self) -> list[Problem]:
        address = self._spec.model.address
        found = [
            problem
            for pod in self._pods[-1:]
            if _is_running(pod)
            and (problem := self._diagnosis.diagnose_pod(pod, f"inspection of {address}"))
        ]
        refused = self._turn.rejection_of(self._slot, self._rejection)
        if refused and not any(map(_is_running, self._pods)):
            found.append(rejection("The pod that inspects the model", refused))
        failure = self._turn.history_of(self._slot).last_failure
        if failure.startswith(_UNFIT_PREFIX):
            cause = shorten(failure.removeprefix(_UNFIT_PREFIX))
            message = f"The model can't be served: {cause}. It is inspected again later."
            found.append(Problem("ModelRefused", message))
        elif failure and not failure.startswith(REJECTED_PREFIX):
            message = f"{address} can't be inspected: {shorten(failure)}. It is retried."
            found.append(Problem("InspectionFailed", message))
        return found


def _without_parts_of_servers(body: Json) -> Json:
    """Leave out what patches add to parts that an inspection has not: the API server refuses half a probe or rule.

    A preStop sleep may be longer than its grace period, which is refused too.
    """

    def kept(container: Json) -> Json:
        dropped = {"lifecycle", *(_OF_SERVERS if container.get("name") == names.CONTAINER else ())}
        return {key: value for key, value in container.items() if key not in dropped}

    rest = {key: value for key, value in body.items() if key != "topologySpreadConstraints"}
    return {**rest, "containers": [kept(one) for one in body["containers"]]}


def _inspection_slot(pod: PodView) -> str:
    return pod.annotations.get(names.TEMPLATE_HASH, "")


def _has_ended(pod: PodView) -> bool:
    """Return True if the inspection's own container has ended: one that a service mesh adds never ends."""
    over = pod.phase in ("Succeeded", "Failed") or pod.container.exit_code is not None
    return pod.deleting_since is None and over


def _is_running(pod: PodView) -> bool:
    return pod.deleting_since is None and not _has_ended(pod)


def _result_of(spec: Spec, pod: PodView) -> ModelStatus:
    container = pod.container
    message = container.exit_message or pod.message or pod.reason or container.exit_reason
    if container.exit_code == EXIT_REFUSED and container.exit_message:
        raise UserError("model", _UNFIT_PREFIX + container.exit_message)
    if container.exit_code or (pod.phase == "Failed" and not container.exit_message):
        raise UserError("model", f"pod {pod.name} ended: {message or 'no message'}")
    return parse_inspection(spec.model, message)
