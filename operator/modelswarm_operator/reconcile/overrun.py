"""The decision for a swarm whose decision used up its CPU seconds: report it, and wait for another spec.

Called by `controller/worker`. The report is in status, so that the next leader does not repeat the attempt. Only a new
spec, the annotation `reconcile-at` or the swarm's deletion starts the next one.
"""

from __future__ import annotations

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import Decision, WriteStatus
from modelswarm_operator.reconcile.state.observed import SwarmView
from modelswarm_operator.reconcile.state.slot_history import read_status
from modelswarm_operator.reconcile.status.conditions import (
    DEGRADED,
    PROGRESSING,
    READY,
    ConditionUpdate,
    apply_updates,
    transition_events,
)

REASON = "DecisionTooLong"


def is_given_up(swarm: SwarmView) -> bool:
    """Return True if a decision about this very spec was given up.

    It reads the stored JSON, because typed conditions of a large swarm take longer than all else on the event loop.
    """
    requested = names.reconcile_request(swarm.annotations)
    if swarm.is_deleting or swarm.status.get("reconciledAt", "") != requested:
        return False
    report = (DEGRADED, REASON, swarm.generation)
    return any(
        (one.get("type"), one.get("reason"), one.get("observedGeneration")) == report
        for one in swarm.status.get("conditions") or ()
    )


def give_up(swarm: SwarmView, cpu_seconds: float, now: float) -> Decision:
    """Return the report. All other fields of the status stay as they are."""
    stored = read_status(swarm.status)
    message = (
        f"The plan of this swarm was given up after {cpu_seconds:g} s of CPU time. Nothing is started, replaced or "
        "deleted until the spec is changed: fewer spans, replicas or pools. To try the same spec again, annotate the "
        f"swarm with {names.RECONCILE_AT}."
    )
    ready = next((one for one in stored.conditions if one.type == READY), None)
    updates = [
        ConditionUpdate(READY, ready.status == "True", ready.reason, ready.message)
        if ready is not None
        else ConditionUpdate(READY, False, REASON, message),
        ConditionUpdate(PROGRESSING, False, "Held", message),
        ConditionUpdate(DEGRADED, True, REASON, message),
    ]
    fields: dict[str, object] = {
        "observed_generation": swarm.generation,
        "conditions": apply_updates(updates, stored.conditions, swarm.generation, now),
        "reconciled_at": names.reconcile_request(swarm.annotations),  # "" if it was removed
    }
    status = stored.model_copy(update=fields).to_json()
    return Decision([WriteStatus(status), *transition_events(updates, stored.conditions)], None)
