"""The scores of a beam search: what runs on, what is finished, and the end; equal to transformers' `_beam_search`.

transformers takes the best max(2, 1 + end tokens) * num_beams of all continuations. Of one beam, no more than
num_beams + end tokens of them can matter: that many log probabilities are enough. Pure; knows no sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.core.interface.turn import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredToken:
    token: int
    logprob: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt. `score`: sum of its log probabilities; of a finished one by its length."""

    tokens: tuple[ScoredToken, ...] = ()
    score: float = 0.0

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(each.token for each in self.tokens)


def tokens_per_beam(options: BeamOptions, end_tokens: Collection[int]) -> int:
    """Return the number of most probable tokens that a step needs for each beam."""
    return options.num_beams + len(end_tokens)


class BeamScorer:
    def __init__(self, options: BeamOptions, end_tokens: Collection[int], max_tokens: int) -> None:
        """`max_tokens`: length at which every continuation ends, at least 1."""
        self._options, self._end_tokens, self._max_tokens = options, end_tokens, max_tokens
        self.running: list[Beam] = [Beam()]
        self.finished: list[Beam] = []  # best first, at most num_beams
        self.is_done = False

    def add_step(self, found: Sequence[Sequence[ScoredToken]]) -> None:
        """Go one token further. `found`: for each running beam its most probable tokens."""
        continued = [
            Beam((*beam.tokens, each), beam.score + each.logprob.logprob)
            for beam, tokens in zip(self.running, found, strict=True)
            for each in tokens
        ]
        continued.sort(key=lambda beam: -beam.score)  # stable: the first beam wins
        length = len(continued[0].tokens)
        num_beams = self._options.num_beams
        self._add_finished([beam for beam in continued[:num_beams] if self._has_ended(beam)])
        self.running = [beam for beam in continued if not self._has_ended(beam)][:num_beams]
        self.is_done = not self.running or not self._can_improve(length)

    def _has_ended(self, beam: Beam) -> bool:
        return len(beam.tokens) == self._max_tokens or beam.tokens[-1].token in self._end_tokens

    def _add_finished(self, ended: Sequence[Beam]) -> None:
        penalty = self._options.length_penalty
        scored = [Beam(beam.tokens, beam.score / len(beam.tokens) ** penalty) for beam in ended]
        merged = sorted([*self.finished, *scored], key=lambda beam: -beam.score)
        self.finished = merged[: self._options.num_beams]

    def _can_improve(self, length: int) -> bool:
        """Return whether a running beam may still become one of the best."""
        options = self._options
        if len(self.finished) < options.num_beams:
            return True
        if options.early_stopping is True:
            return False
        longest = options.early_stopping == "never" and options.length_penalty > 0
        reached = self._max_tokens if longest else length
        best: float = self.running[0].score / reached**options.length_penalty
        return best > self.finished[-1].score
