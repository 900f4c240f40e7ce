"""What the three conditions say of a living swarm, in one word and one sentence each.

Called by `reconcile` when everything else is decided; `deletion` has its own. Knows what was found, decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.resources.status import Condition
from modelswarm_operator.reconcile.status.conditions import DEGRADED, PROGRESSING, READY, Verdict
from modelswarm_operator.reconcile.status.problems import Problem, summary
from modelswarm_operator.reconcile.status.status import Tally

UNCOVERED = "SpanUncovered"


@dataclass(frozen=True, slots=True)
class Situation:
    tally: Tally
    problems: Sequence[Problem]
    paused: bool
    suspended: bool
    held: bool  # nothing is started or ended until a problem is solved
    inspecting: bool
    foreign: int  # pods of an earlier plan that are still there
    outdated: int  # pods of an older recipe that still serve
    surplus: int  # other pods that are to go


def verdicts_of(situation: Situation, stored: Sequence[Condition]) -> list[Verdict]:
    ready = next((one for one in stored if one.type == READY), None)
    lost = ready is not None and (ready.status == "True" or ready.reason == UNCOVERED)
    return [_ready(situation, lost), _progressing(situation), _degraded(situation, lost)]


def _ready(situation: Situation, lost: bool) -> Verdict:
    tally = situation.tally
    if tally.coverage > 0:
        if tally.complete:
            return Verdict(
                READY, True, "AllServersReady", f"All {tally.desired} servers are ready."
            )
        said = f"Every block has a ready server; {tally.missing} of {tally.desired} servers are missing."
        return Verdict(READY, True, "Covered", said)
    if situation.suspended:
        return Verdict(READY, False, "Suspended", "spec.replicas is 0: no servers are wanted.")
    if situation.problems and not lost:
        reason, message = summary(situation.problems)
        return Verdict(READY, False, reason, message)
    if situation.inspecting:
        return Verdict(
            READY, False, "Inspecting", "A pod looks at the model before servers are planned."
        )
    if situation.paused and not tally.spans:
        return Verdict(READY, False, "Paused", "spec.paused is true: nothing is started.")
    if lost:
        return Verdict(READY, False, UNCOVERED, _uncovered(situation))
    return Verdict(READY, False, "Starting", f"No server is ready yet for blocks {_blocks(tally)}.")


def _uncovered(situation: Situation) -> str:
    said = f"No ready server holds blocks {_blocks(situation.tally)} any more."
    return f"{said} {summary(situation.problems)[1]}" if situation.problems else said


def _blocks(tally: Tally) -> str:
    names = tally.uncovered or ["0:…"]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def _progressing(situation: Situation) -> Verdict:
    tally = situation.tally
    if situation.paused:
        said = "spec.paused is true: nothing is started, replaced or ended."
        return Verdict(PROGRESSING, False, "Paused", said)
    if situation.inspecting:
        return Verdict(PROGRESSING, True, "Inspecting", "A pod looks at the model.")
    if situation.held:
        said = "Nothing is started or ended until the spec is corrected; what runs is left alone."
        return Verdict(PROGRESSING, False, "Held", said)
    if situation.foreign:
        said = f"{situation.foreign} pods of the earlier plan go as soon as the new ones serve."
        return Verdict(PROGRESSING, True, "Replanning", said)
    if situation.outdated:
        said = f"{situation.outdated} servers are still by the old spec; they are replaced in turn."
        return Verdict(PROGRESSING, True, "Rolling", said)
    if tally.missing:
        said = f"{tally.desired - tally.missing} of {tally.desired} servers are ready."
        return Verdict(PROGRESSING, True, "Filling", said)
    if situation.surplus:
        said = f"{situation.surplus} pods that are not needed are ending."
        return Verdict(PROGRESSING, True, "Shrinking", said)
    return Verdict(PROGRESSING, False, "Settled", "What runs is what is wanted.")


def _degraded(situation: Situation, lost: bool) -> Verdict:
    problems = list(situation.problems)
    if lost and situation.tally.coverage == 0 and not situation.suspended:
        said = f"No ready server holds blocks {_blocks(situation.tally)}; sessions wait."
        problems.append(Problem(UNCOVERED, said))
    if not problems:
        return Verdict(DEGRADED, False, "AsExpected", "Nothing needs attention.")
    reason, message = summary(problems)
    return Verdict(DEGRADED, True, reason, message)
