"""What the three conditions say of a living swarm, in one word and one sentence each.

Called by `reconcile` when everything else is decided; `deletion` has its own. Knows what was found, decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.resources.status import Condition
from modelswarm_operator.reconcile.status.conditions import (
    DEGRADED,
    PROGRESSING,
    READY,
    ConditionUpdate,
)
from modelswarm_operator.reconcile.status.problems import Problem, summarize
from modelswarm_operator.reconcile.status.status import ReadyCounts

UNCOVERED = "SpanUncovered"


@dataclass(frozen=True, slots=True)
class SwarmSummary:
    ready_counts: ReadyCounts
    problems: Sequence[Problem]
    is_paused: bool
    is_suspended: bool
    is_held: bool  # nothing is started or ended until a problem is solved
    is_inspecting: bool
    from_older_plan: int  # pods of an earlier plan that are still there
    outdated: int  # pods of an older recipe that still serve
    surplus: int  # other pods that are to go


def condition_updates(
    situation: SwarmSummary, stored: Sequence[Condition]
) -> list[ConditionUpdate]:
    ready = next((one for one in stored if one.type == READY), None)
    lost = ready is not None and (ready.status == "True" or ready.reason == UNCOVERED)
    return [_ready(situation, lost), _progressing(situation), _degraded(situation, lost)]


def _ready(situation: SwarmSummary, lost: bool) -> ConditionUpdate:
    ready_counts = situation.ready_counts
    if ready_counts.coverage > 0:
        if ready_counts.is_complete:
            return ConditionUpdate(
                READY, True, "AllServersReady", f"All {ready_counts.desired} servers are ready."
            )
        said = f"Every block has a ready server; {ready_counts.missing} of {ready_counts.desired} servers are missing."
        return ConditionUpdate(READY, True, "Covered", said)
    if situation.is_suspended:
        return ConditionUpdate(
            READY, False, "Suspended", "spec.replicas is 0: no servers are wanted."
        )
    if situation.problems and not lost:
        reason, message = summarize(situation.problems)
        return ConditionUpdate(READY, False, reason, message)
    if situation.is_inspecting:
        return ConditionUpdate(
            READY, False, "Inspecting", "A pod looks at the model before servers are planned."
        )
    if situation.is_paused and not ready_counts.spans:
        return ConditionUpdate(READY, False, "Paused", "spec.paused is true: nothing is started.")
    if lost:
        return ConditionUpdate(READY, False, UNCOVERED, _uncovered_message(situation))
    return ConditionUpdate(
        READY,
        False,
        "Starting",
        f"No server is ready yet for blocks {_uncovered_blocks(ready_counts)}.",
    )


def _uncovered_message(situation: SwarmSummary) -> str:
    said = f"No ready server holds blocks {_uncovered_blocks(situation.ready_counts)} any more."
    return f"{said} {summarize(situation.problems)[1]}" if situation.problems else said


def _uncovered_blocks(ready_counts: ReadyCounts) -> str:
    names = ready_counts.uncovered or ["0:…"]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def _progressing(situation: SwarmSummary) -> ConditionUpdate:
    ready_counts = situation.ready_counts
    if situation.is_paused:
        said = "spec.paused is true: nothing is started, replaced or ended."
        return ConditionUpdate(PROGRESSING, False, "Paused", said)
    if situation.is_inspecting:
        return ConditionUpdate(PROGRESSING, True, "Inspecting", "A pod looks at the model.")
    if situation.is_held:
        said = "Nothing is started or ended until the spec is corrected; what runs is left alone."
        return ConditionUpdate(PROGRESSING, False, "Held", said)
    if situation.from_older_plan:
        said = f"{situation.from_older_plan} pods of the earlier plan go as soon as the new ones serve."
        return ConditionUpdate(PROGRESSING, True, "Replanning", said)
    if situation.outdated:
        said = f"{situation.outdated} servers are still by the old spec; they are replaced in turn."
        return ConditionUpdate(PROGRESSING, True, "Rolling", said)
    if ready_counts.missing:
        said = f"{ready_counts.desired - ready_counts.missing} of {ready_counts.desired} servers are ready."
        return ConditionUpdate(PROGRESSING, True, "Filling", said)
    if situation.surplus:
        said = f"{situation.surplus} pods that are not needed are ending."
        return ConditionUpdate(PROGRESSING, True, "Shrinking", said)
    return ConditionUpdate(PROGRESSING, False, "Settled", "What runs is what is wanted.")


def _degraded(situation: SwarmSummary, lost: bool) -> ConditionUpdate:
    problems = list(situation.problems)
    if lost and situation.ready_counts.coverage == 0 and not situation.is_suspended:
        said = f"No ready server holds blocks {_uncovered_blocks(situation.ready_counts)}; sessions wait."
        problems.append(Problem(UNCOVERED, said))
    if not problems:
        return ConditionUpdate(DEGRADED, False, "AsExpected", "Nothing needs attention.")
    reason, message = summarize(problems)
    return ConditionUpdate(DEGRADED, True, reason, message)
