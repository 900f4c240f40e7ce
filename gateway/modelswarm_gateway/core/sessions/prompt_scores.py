"""Log probabilities of a prompt, reported by the tail: the position up to which the gateway has them.

Used by `gateway.py` and the recovery loop. A turn that asks for them runs its whole prompt. After a fault in its middle
the tail is truncated to the first row that is not scored. So replay (R6) brings exactly the missing rows.
"""

from __future__ import annotations

from dataclasses import replace

from modelswarm.protocol.messages import PromptLogprobs
from modelswarm_gateway.core.interface.effects import PromptScored
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, Session


def needs_scores(session: Session) -> bool:
    """True while log probabilities of the prompt are to come."""
    turn = session.turn
    return turn.sampling.prompt_logprobs >= 0 and session.scored < turn.begin


def begin_scores(session: Session, is_resumed: bool) -> None:
    """Prepare a new turn. A resumed one has shown its prompt before."""
    session.scored = session.turn.begin if is_resumed else 1
    _end_scores(session)
    for hop in session.owned_hops if needs_scores(session) else ():
        hop.truncate(0, NO_TRUNCATION)  # only rows that run can be scored


def truncate_unscored(session: Session) -> None:
    """Let the tail run every row again whose log probability is missing."""
    if not needs_scores(session) or session.variant is None:
        return
    for hop in session.owned_hops:
        if hop.last == session.blocks[1]:
            hop.truncate(session.scored - 1, NO_TRUNCATION)


def take_scores(session: Session, item: PromptLogprobs) -> PromptScored | None:
    """Take what is new. `item.start` is at most the position that is expected."""
    first = session.scored
    entries = item.entries[first - item.start : session.turn.begin - item.start]
    if not entries:
        return None
    session.scored += len(entries)
    session.result_groups += 1
    _end_scores(session)
    return PromptScored(session.name, first, entries)


def _end_scores(session: Session) -> None:
    """Once all are here, tails that are created later must not report them again."""
    turn = session.turn
    if not needs_scores(session) and turn.sampling.prompt_logprobs >= 0:
        session.turn = replace(turn, sampling=replace(turn.sampling, prompt_logprobs=-1))
