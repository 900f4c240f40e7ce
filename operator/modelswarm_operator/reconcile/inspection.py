"""Finds out what a model is by a pod that sees its weights; the answer is kept in status.

Called once per turn while the model is not known. One pod at a time; a failure is told in the pod's own words and tried
again later, or at once when the user changes what the pod is made from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from modelswarm.checkpoint.inspection import REFUSED as EXIT_REFUSED
from modelswarm.errors import UserError
from modelswarm.resources.spec import Spec
from modelswarm.resources.status import ModelStatus
from modelswarm_operator.reconcile.manifests.manifests import Maker, inspection_pod
from modelswarm_operator.reconcile.manifests.pod_template import patched, patches_of
from modelswarm_operator.reconcile.model.facts import told_model
from modelswarm_operator.reconcile.model.span_plan import DEFAULT_POOL
from modelswarm_operator.reconcile.pods.inventory import PodInventory, incarnation_of_pod
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import Json, Observed, PodView
from modelswarm_operator.reconcile.state.turn import REJECTED_PREFIX, Turn
from modelswarm_operator.reconcile.status.pod_diagnosis import Doctor
from modelswarm_operator.reconcile.status.problems import Problem, cut, refusal

_UNFIT = "unfit: "  # how a failure begins that the inspection itself told


@dataclass(frozen=True, slots=True)
class Finding:
    known: ModelStatus | None
    problems: tuple[Problem, ...]


def dismiss(fleet: PodInventory, ledger: Turn, but: str = "") -> None:
    """Ends inspections and forgets their failures, except of slot `but`."""
    for pod in fleet.inspections:
        if not but or _slot_of(pod) != but:
            ledger.delete_pod(pod, "its inspection is not needed any more")
    for slot in [slot for slot in ledger.slots if slot.startswith(names.INSPECT_SLOT)]:
        if slot != but:
            ledger.slots.pop(slot)


def find_out(observed: Observed, maker: Maker, spec: Spec, fleet: PodInventory, ledger: Turn) -> Finding:
    return _Inspection(observed, maker, spec, fleet, ledger).find_out()


class _Inspection:
    def __init__(
        self, observed: Observed, maker: Maker, spec: Spec, fleet: PodInventory, ledger: Turn
    ) -> None:
        self._maker, self._spec, self._fleet, self._ledger = maker, spec, fleet, ledger
        self._pool = (spec.pools or (DEFAULT_POOL,))[0]
        self._slot = self._slot_for()
        self._refused = observed.rejected.get(self._slot, "")
        self._doctor = Doctor(ledger, observed.nodes, {})
        mine = (pod for pod in fleet.inspections if _slot_of(pod) == self._slot)
        self._pods = sorted(mine, key=incarnation_of_pod)

    def _slot_for(self) -> str:
        """By everything the pod is made from: a corrected document starts afresh."""
        parts = (self._spec.model, self._pool)
        text = "".join(part.model_dump_json(by_alias=True, exclude_defaults=True) for part in parts)
        return f"{names.INSPECT_SLOT}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def find_out(self) -> Finding:
        dismiss(self._fleet, self._ledger, but=self._slot)
        if self._pods and _ended(self._pods[-1]):
            known = self._answer(self._pods[-1])
            if known is not None:
                dismiss(self._fleet, self._ledger)
                said = f"{known.source}: {known.family}, {known.blocks} blocks"
                self._ledger.record_event("Normal", "ModelFound", said)
                return Finding(known, ())
        self._start()
        return Finding(None, tuple(self._problems()))

    def _answer(self, pod: PodView) -> ModelStatus | None:
        try:
            return _answer_of(self._spec, pod)
        except UserError as error:
            self._ledger.delete_pod(pod, "its inspection failed")
            self._ledger.record_failure(self._slot, error.message)
            self._ledger.allocate(self._slot)
            return None

    def _start(self) -> None:
        ledger, slot = self._ledger, self._slot
        for pod in self._pods:
            if pod.name in self._fleet.unreachable:
                ledger.delete_pod(pod, "its node is not ready")
        working = [pod for pod in self._pods if _works(pod) and pod.name not in ledger.deletes]
        for pod in working[:-1]:
            ledger.delete_pod(pod, "a later inspection runs")
        if working:
            return
        if not ledger.is_in_flight(slot):
            ledger.allocate(slot)
        ledger.create_due(slot, self._refused, self._make)

    def _make(self, incarnation: int) -> Json:
        address = self._spec.model.address
        pod = inspection_pod(self._maker, self._spec, address, self._slot, incarnation)
        patches = patches_of(self._spec, self._pool, self._maker.policy.pod_template)
        return patched(pod, patches)[0]

    def _problems(self) -> list[Problem]:
        address = self._spec.model.address
        found = [
            problem
            for pod in self._pods[-1:]
            if _works(pod) and (problem := self._doctor.pod(pod, f"inspection of {address}"))
        ]
        if self._refused:
            found.append(refusal("The pod that inspects the model", self._refused))
        failure = self._ledger.history_of(self._slot).last_failure
        if failure.startswith(_UNFIT):
            words = cut(failure.removeprefix(_UNFIT))
            said = f"The model can't be served: {words}. It is looked at again later."
            found.append(Problem("ModelRefused", said))
        elif failure and not failure.startswith(REJECTED_PREFIX):
            said = f"{address} can't be inspected: {cut(failure)}. It is tried again."
            found.append(Problem("InspectionFailed", said))
        return found


def _slot_of(pod: PodView) -> str:
    return pod.annotations.get(names.PLAN, "")


def _ended(pod: PodView) -> bool:
    """Its own container decides: one that a mesh puts beside it never ends."""
    over = pod.phase in ("Succeeded", "Failed") or pod.container.exit_code is not None
    return pod.deleting_since is None and over


def _works(pod: PodView) -> bool:
    return pod.deleting_since is None and not _ended(pod)


def _answer_of(spec: Spec, pod: PodView) -> ModelStatus:
    container = pod.container
    words = container.exit_message or pod.message or pod.reason or container.exit_reason
    if container.exit_code == EXIT_REFUSED and container.exit_message:
        raise UserError("model", _UNFIT + container.exit_message)
    if container.exit_code or (pod.phase == "Failed" and not container.exit_message):
        raise UserError("model", f"pod {pod.name} ended: {words or 'it said nothing'}")
    return told_model(spec.model, words)
