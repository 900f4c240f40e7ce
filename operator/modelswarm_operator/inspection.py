"""Finds out what a model is by a pod that sees its weights; the answer is kept in status.

Called once per turn while the model is not known. One pod at a time; a failure is told in the pod's own words and tried
again later, or at once when the user changes what the pod is made from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from modelswarm.checkpoint.inspect import REFUSED
from modelswarm.errors import UserError
from modelswarm.resources import Spec
from modelswarm.resources_status import ModelStatus
from modelswarm_operator import names
from modelswarm_operator.facts import address_of, told_model
from modelswarm_operator.fleet import Fleet, incarnation_of
from modelswarm_operator.layout import DEFAULT_POOL
from modelswarm_operator.ledger import REFUSED as REFUSED_BY_API
from modelswarm_operator.ledger import Ledger
from modelswarm_operator.manifests import Maker, inspection_pod
from modelswarm_operator.problems import Problem, cut, pod_problem
from modelswarm_operator.template import patched, patches_of
from modelswarm_operator.world import Json, PodView

_UNFIT = "unfit: "  # how a failure begins that the inspection itself told


@dataclass(frozen=True, slots=True)
class Finding:
    known: ModelStatus | None
    problems: tuple[Problem, ...]


def dismiss(fleet: Fleet, ledger: Ledger, but: str = "") -> None:
    """Ends inspections and forgets their failures, except of slot `but`."""
    for pod in fleet.inspections:
        if not but or _slot_of(pod) != but:
            ledger.delete(pod, "its inspection is not needed any more")
    for slot in [slot for slot in ledger.slots if slot.startswith(names.INSPECT_SLOT)]:
        if slot != but:
            ledger.slots.pop(slot)


def find_out(maker: Maker, spec: Spec, fleet: Fleet, ledger: Ledger, refused: str) -> Finding:
    slot = slot_for(spec)
    dismiss(fleet, ledger, but=slot)
    pods = sorted((pod for pod in fleet.inspections if _slot_of(pod) == slot), key=incarnation_of)
    if pods and _ended(pods[-1]):
        try:
            known = _answer(spec, pods[-1])
        except UserError as error:
            ledger.delete(pods[-1], "its inspection failed")
            ledger.fail(slot, error.message)
            ledger.promise(slot)
        else:
            dismiss(fleet, ledger)
            ledger.tell(
                "Normal", "ModelFound", f"{known.source}: {known.family}, {known.blocks} blocks"
            )
            return Finding(known, ())
    _start(maker, spec, pods, fleet.out_of_reach, ledger, refused)
    return Finding(None, tuple(_problems(spec, pods, ledger.memory(slot).last_failure)))


def slot_for(spec: Spec) -> str:
    """By everything the pod is made from: a corrected document starts afresh."""
    pool = (spec.pools or (DEFAULT_POOL,))[0]
    parts = [
        part.model_dump_json(by_alias=True, exclude_defaults=True) for part in (spec.model, pool)
    ]
    return f"{names.INSPECT_SLOT}-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:12]}"


def _slot_of(pod: PodView) -> str:
    return pod.annotations.get(names.PLAN, "")


def _ended(pod: PodView) -> bool:
    return pod.deleting_since is None and pod.phase in ("Succeeded", "Failed")


def _answer(spec: Spec, pod: PodView) -> ModelStatus:
    container = pod.container
    words = container.exit_message or pod.message or pod.reason or container.exit_reason
    if container.exit_code == REFUSED and container.exit_message:
        raise UserError("model", _UNFIT + container.exit_message)
    if pod.phase == "Failed":
        raise UserError("model", f"pod {pod.name} ended: {words or 'it said nothing'}")
    return told_model(spec.model, words)


def _start(
    maker: Maker,
    spec: Spec,
    pods: list[PodView],
    out_of_reach: frozenset[str],
    ledger: Ledger,
    refused: str,
) -> None:
    slot = slot_for(spec)
    for pod in pods:
        if pod.name in out_of_reach:
            ledger.delete(pod, "its node is not ready")
    working = [
        pod
        for pod in pods
        if pod.name not in ledger.deletes and not _ended(pod) and pod.deleting_since is None
    ]
    for pod in working[:-1]:
        ledger.delete(pod, "a later inspection runs")
    if working:
        return
    if not ledger.outstanding(slot):
        ledger.promise(slot)

    def make(incarnation: int) -> Json:
        pod = inspection_pod(maker, spec, address_of(spec.model), slot, incarnation)
        pool = (spec.pools or (DEFAULT_POOL,))[0]
        return patched(pod, patches_of(spec, pool, maker.policy.pod_template))[0]

    ledger.fulfil(slot, refused, make)


def _problems(spec: Spec, pods: list[PodView], failure: str) -> list[Problem]:
    address = address_of(spec.model)
    found = [
        problem
        for pod in pods[-1:]
        if not _ended(pod) and (problem := pod_problem(pod, f"inspection of {address}"))
    ]
    if failure.startswith(_UNFIT):
        words = cut(failure.removeprefix(_UNFIT))
        found.append(
            Problem(
                "ModelRefused", f"The model can't be served: {words}. It is looked at again later."
            )
        )
    elif failure and not failure.startswith(REFUSED_BY_API):
        found.append(
            Problem(
                "InspectionFailed",
                f"{address} can't be inspected: {cut(failure)}. It is tried again.",
            )
        )
    return found
