"""The turn of a broken stream, as a gateway resumes it from the log that is left of it (R17, sampling).

Does what `generation/` does for a request with a Last-Event-ID: the parameters are those of the kept turn. Used by
`client.py`, which checks them by the tokens that follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm_gateway.core.interface.turn import ParkedTurn, TurnRequest


@dataclass(frozen=True, slots=True)
class LeftTurn:
    """A turn whose stream broke: its request, the end of its log, and the log that the client has received."""

    request: TurnRequest
    end: int
    received: tuple[int, ...]

    @property
    def begin(self) -> int:
        return turn_begin(self.request)


def turn_begin(request: TurnRequest) -> int:
    """Return the length of the log at which the turn of a request began, perhaps at another gateway."""
    return len(request.tokens) if request.begin is None else request.begin


def resume_request(left: LeftTurn, kept: ParkedTurn) -> TurnRequest | None:
    """Return the request that goes on behind the kept log; None if that is of another turn, or lacks received tokens.

    `max_tokens` is 0 if the kept log ends the turn.
    """
    begin, known = left.begin, len(left.received)
    if kept.turn.begin != begin or kept.tokens[:known] != left.received or known <= begin:
        return None
    end = len(kept.tokens)
    if left.request.keeps_logprobs:
        end = next((at for at in range(known, end) if at not in kept.logprobs), end)
    tokens, rest = kept.tokens[:end], kept.turn.end - end
    has_ended = tokens[-1] in left.request.sampling.eos
    return TurnRequest(
        tokens,
        0 if has_ended else rest,
        kept.turn.sampling,
        left.request.credit_ahead,
        is_resumed=True,
        begin=begin,
        keeps_logprobs=left.request.keeps_logprobs,
    )
