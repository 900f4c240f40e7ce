"""The rules of the three conditions of a swarm that is not being deleted: one reason and one sentence for each.

Called by `reconciler` when everything else is decided; `deletion` has its own. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
_HARMLESS = "PodTemplateReserved"  # keeps no server from getting ready
_MAX_STARTS = 3  # servers whose start is described
_MAX_READY_MESSAGE = 1300  # characters before the warning about chats, which must be complete


@dataclass(frozen=True, slots=True)
class SwarmSummary:
    ready_counts: ReadyCounts
    problems: Sequence[Problem]
    is_paused: bool
    is_suspended: bool
    is_held: bool  # nothing is started or deleted until a problem is solved
    is_inspecting: bool
    from_older_plan: int  # pods of an earlier plan that still exist
    outdated: int  # pods of an older template that still serve
    surplus: int  # other pods that are to be deleted
    starts: Sequence[str] = ()  # servers that are not ready, and what their starts wait for
    chat_warning: str = ""  # why chats are refused


def condition_updates(
    situation: SwarmSummary, stored: Sequence[Condition]
) -> list[ConditionUpdate]:
    ready = next((one for one in stored if one.type == READY), None)
    lost = ready is not None and (ready.status == "True" or ready.reason == UNCOVERED)
    ready_update = _ready(situation, lost)
    if situation.chat_warning:
        message = f"{ready_update.message[:_MAX_READY_MESSAGE]} {situation.chat_warning}"
        ready_update = replace(ready_update, message=message)
    return [ready_update, _progressing(situation), _degraded(situation, lost)]


def describe_starts(starts: Sequence[str]) -> str:
    """Return the sentence about the first starts, with a blank before it; "" if there are none."""
    if not starts:
        return ""
    more = len(starts) - _MAX_STARTS
    also = f"; and {more} more" if more > 0 else ""
    return f" {'; '.join(sorted(starts)[:_MAX_STARTS])}{also}."


def _ready(situation: SwarmSummary, lost: bool) -> ConditionUpdate:
    ready_counts = situation.ready_counts
    if ready_counts.coverage > 0:
        if ready_counts.is_complete:
            return ConditionUpdate(
                READY, True, "AllServersReady", f"All {ready_counts.desired} servers are ready."
            )
        missing = f"{ready_counts.missing} of {ready_counts.desired} servers are missing"
        message = f"Every block has a ready server; {missing}.{describe_starts(situation.starts)}"
        return ConditionUpdate(READY, True, "Covered", message)
    if situation.is_suspended:
        return ConditionUpdate(
            READY, False, "Suspended", "spec.replicas is 0: no servers are desired."
        )
    causes = [problem for problem in situation.problems if problem.reason != _HARMLESS]
    if causes and not lost:
        reason, message = summarize(causes)
        return ConditionUpdate(READY, False, reason, message)
    if situation.is_inspecting:
        return ConditionUpdate(
            READY, False, "Inspecting", "A pod inspects the model before servers are planned."
        )
    if situation.is_paused and not ready_counts.spans:
        return ConditionUpdate(READY, False, "Paused", "spec.paused is true: nothing is started.")
    if lost:
        return ConditionUpdate(READY, False, UNCOVERED, _uncovered_message(situation))
    return ConditionUpdate(
        READY,
        False,
        "Starting",
        f"No server is ready yet for blocks {_uncovered_blocks(ready_counts)}."
        f"{describe_starts(situation.starts)}",
    )


def _uncovered_message(situation: SwarmSummary) -> str:
    message = f"No ready server holds blocks {_uncovered_blocks(situation.ready_counts)} any more."
    message += describe_starts(situation.starts)
    return f"{message} {summarize(situation.problems)[1]}" if situation.problems else message


def _uncovered_blocks(ready_counts: ReadyCounts) -> str:
    names = ready_counts.uncovered or ["0:…"]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def _progressing(situation: SwarmSummary) -> ConditionUpdate:
    ready_counts = situation.ready_counts
    if situation.is_paused:
        message = "spec.paused is true: nothing is started, replaced or deleted."
        return ConditionUpdate(PROGRESSING, False, "Paused", message)
    if situation.is_inspecting:
        return ConditionUpdate(PROGRESSING, True, "Inspecting", "A pod inspects the model.")
    if situation.is_held and not situation.surplus:
        message = "Nothing is started or deleted until the spec is corrected; running pods stay."
        return ConditionUpdate(PROGRESSING, False, "Held", message)
    if situation.from_older_plan:
        message = f"{situation.from_older_plan} pods of the earlier plan are deleted as soon as the new ones serve."
        return ConditionUpdate(PROGRESSING, True, "Replanning", message)
    if situation.outdated:
        message = (
            f"{situation.outdated} servers still have the old spec; they are replaced in turn."
        )
        return ConditionUpdate(PROGRESSING, True, "Rolling", message)
    if ready_counts.missing:
        message = f"{ready_counts.desired - ready_counts.missing} of {ready_counts.desired} servers are ready."
        message += describe_starts(situation.starts)
        return ConditionUpdate(PROGRESSING, True, "Filling", message)
    if situation.surplus:
        message = f"{situation.surplus} pods that are not needed are terminating."
        return ConditionUpdate(PROGRESSING, True, "Shrinking", message)
    return ConditionUpdate(PROGRESSING, False, "Settled", "The swarm matches its spec.")


def _degraded(situation: SwarmSummary, lost: bool) -> ConditionUpdate:
    problems = list(situation.problems)
    if lost and situation.ready_counts.coverage == 0 and not situation.is_suspended:
        message = f"No ready server holds blocks {_uncovered_blocks(situation.ready_counts)}; sessions wait."
        problems.append(Problem(UNCOVERED, message))
    if not problems:
        return ConditionUpdate(DEGRADED, False, "AsExpected", "Nothing needs attention.")
    reason, message = summarize(problems)
    return ConditionUpdate(DEGRADED, True, reason, message)
