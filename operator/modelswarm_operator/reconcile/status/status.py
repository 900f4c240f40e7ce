"""The status of a swarm, put together at the end of a turn: as it will be when the turn's actions are done.

Because pods that this turn removes are not counted any more, removing one always changes status, and the status is
written first: an operator that saw an older state fails there and removes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.resources.status import (
    Condition,
    ModelStatus,
    PlanStatus,
    SpanStatus,
    Status,
)
from modelswarm_operator.reconcile.pods.inventory import Server
from modelswarm_operator.reconcile.pods.rollout import cover_of
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import SwarmView
from modelswarm_operator.reconcile.state.slot_history import slot_statuses
from modelswarm_operator.reconcile.state.turn import Turn

_MOST_SPANS_IN_TEXT = 16


@dataclass(frozen=True, slots=True)
class Tally:
    """Who serves what, counted over pods that this turn leaves alone."""

    spans: tuple[SpanStatus, ...]
    coverage: int

    @property
    def complete(self) -> bool:
        return bool(self.spans) and all(span.ready >= span.desired for span in self.spans)

    @property
    def uncovered(self) -> list[str]:
        return [span.blocks for span in self.spans if span.ready == 0]

    @property
    def missing(self) -> int:
        return sum(max(0, span.desired - span.ready) for span in self.spans)

    @property
    def desired(self) -> int:
        return sum(span.desired for span in self.spans)


def tally_of(
    servers: Sequence[Server],
    plan: PlanStatus | None,
    generation: str,
    desired: int,
    ledger: Turn,
) -> Tally:
    """Spans list servers of this generation ("": any); coverage is what clients have, by whichever."""
    serving = [one for one in servers if one.is_serving and one.pod.name not in ledger.deletes]
    if plan is None or not plan.spans:
        return Tally((), 0)
    by_blocks: dict[str, list[str]] = {}
    for server in (one for one in serving if generation in ("", one.model_hash)):
        by_blocks.setdefault(server.blocks, []).append(server.pod.name)
    spans = []
    for span in plan.spans:
        found = sorted(by_blocks.get(f"{span.first}:{span.last}", ()))
        told = SpanStatus(
            index=span.index, blocks=f"{span.first}:{span.last}", ready=len(found),
            desired=desired, servers=tuple(found),
        )  # fmt: skip
        spans.append(told)
    return Tally(tuple(spans), _coverage(serving, plan.spans[-1].last))


def _coverage(serving: Sequence[Server], blocks: int) -> int:
    """Servers of different models can't share a route: the best-covered model counts."""
    generations = {server.model_hash for server in serving}
    return max(
        (
            min(cover_of((one for one in serving if one.model_hash == generation), blocks))
            for generation in generations
        ),
        default=0,
    )


def status_of(
    swarm: SwarmView,
    url: str,
    tally: Tally,
    conditions: tuple[Condition, ...],
    ledger: Turn,
    model: ModelStatus | None,
    plan: PlanStatus | None,
    served: str,
) -> Status:
    desired = tally.spans[0].desired if tally.spans else 0
    told: dict[str, object] = {
        "observed_generation": swarm.generation,
        "conditions": conditions,
        "served_name": served,
        "replicas": tally.coverage,  # of equal spans, the fewest servers of a span
        "selector": f"{names.SWARM_UID}={swarm.uid},{names.ROLE}={names.SERVER},{names.SPAN}=0",
        "coverage": tally.coverage,
        "coverage_text": f"{tally.coverage}/{desired}",
        "incarnation": ledger.incarnation,
    }
    if asked := names.asked_at(swarm.annotations):
        told["reconciled_at"] = asked
    if url:
        told["url"] = url
    if tally.spans:
        told |= {"spans": tally.spans, "spans_text": _text(tally.spans)}
    if model is not None:
        told["model"] = model
    if plan is not None:
        told["plan"] = plan
    if slots := slot_statuses(ledger.slots):
        told["slots"] = slots
    return Status.model_validate(told)


def _text(spans: Sequence[SpanStatus]) -> str:
    shown = " ".join(
        f"{one.blocks}={one.ready}/{one.desired}" for one in spans[:_MOST_SPANS_IN_TEXT]
    )
    return shown if len(spans) <= _MOST_SPANS_IN_TEXT else f"{shown} …"
