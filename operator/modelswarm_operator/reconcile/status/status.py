"""The status of a swarm, built at the end of a turn: its state once the turn's actions are done.

Pods that this turn deletes are not counted any more, so every deletion changes the status. The status is written
first, so an operator that decided on a stale view fails there and deletes nothing. Decides nothing.
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
from modelswarm_operator.reconcile.pods.rollout import coverage_by_model
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import SwarmView
from modelswarm_operator.reconcile.state.slot_history import slot_statuses
from modelswarm_operator.reconcile.state.turn import Turn

_MAX_SPANS_IN_TEXT = 16


@dataclass(frozen=True, slots=True)
class ReadyCounts:
    """Ready servers by span, counted over pods that this turn does not delete."""

    spans: tuple[SpanStatus, ...]
    coverage: int

    @property
    def is_complete(self) -> bool:
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


def count_ready(
    servers: Sequence[Server],
    plan: PlanStatus | None,
    model_hash: str,
    desired: int,
    turn: Turn,
) -> ReadyCounts:
    """Count servers. Spans list those of this model hash ("": any); coverage counts the best-covered model of any."""
    serving = [one for one in servers if one.is_serving and one.pod.name not in turn.deletes]
    if plan is None or not plan.spans:
        return ReadyCounts((), 0)
    by_blocks: dict[str, list[str]] = {}
    for server in (one for one in serving if model_hash in ("", one.model_hash)):
        by_blocks.setdefault(server.blocks, []).append(server.pod.name)
    spans = []
    for span in plan.spans:
        found = sorted(by_blocks.get(f"{span.first}:{span.last}", ()))
        span_status = SpanStatus(
            index=span.index, blocks=f"{span.first}:{span.last}", ready=len(found),
            desired=desired, servers=tuple(found),
        )  # fmt: skip
        spans.append(span_status)
    covers = coverage_by_model(serving, plan.spans[-1].last).values()
    return ReadyCounts(tuple(spans), max(map(min, covers), default=0))


def build_status(
    swarm: SwarmView,
    url: str,
    ready_counts: ReadyCounts,
    conditions: tuple[Condition, ...],
    turn: Turn,
    model: ModelStatus | None,
    plan: PlanStatus | None,
    model_names: tuple[str, ...],
) -> Status:
    desired = ready_counts.spans[0].desired if ready_counts.spans else 0
    fields: dict[str, object] = {
        "observed_generation": swarm.generation,
        "conditions": conditions,
        "served_name": model_names[0],
        "replicas": ready_counts.coverage,  # of equal spans, the fewest servers of a span
        "selector": f"{names.SWARM_UID}={swarm.uid},{names.ROLE}={names.SERVER},{names.SPAN}=0",
        "coverage": ready_counts.coverage,
        "coverage_text": f"{ready_counts.coverage}/{desired}",
        "incarnation": turn.incarnation,
    }
    if requested := names.reconcile_request(swarm.annotations):
        fields["reconciled_at"] = requested
    if adapters := model_names[1:]:
        fields["adapters"] = adapters
    if url:
        fields["url"] = url
    if ready_counts.spans:
        fields |= {"spans": ready_counts.spans, "spans_text": _spans_text(ready_counts.spans)}
    if model is not None:
        fields["model"] = model
    if plan is not None:
        fields["plan"] = plan
    if slots := slot_statuses(turn.slots):
        fields["slots"] = slots
    return Status.model_validate(fields)


def _spans_text(spans: Sequence[SpanStatus]) -> str:
    shown = " ".join(
        f"{one.blocks}={one.ready}/{one.desired}" for one in spans[:_MAX_SPANS_IN_TEXT]
    )
    return shown if len(spans) <= _MAX_SPANS_IN_TEXT else f"{shown} …"
