"""Log probabilities of a turn's tokens, released together with the text that they belong to.

Used by a generation that was asked for them. A token whose text is withheld (half a character, the beginning of a stop
string) is withheld too. The tokens of a stop string are never released. Knows neither JSON nor tokenizers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from modelswarm.protocol.messages import PromptLogprob, TopLogprob
from modelswarm_gateway.backend.token_stream import TokenEvent


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer with its log probability; `offset`: characters of the answer before its text."""

    token: int
    logprob: float | None  # None: the first token of a prompt, which follows nothing
    top: tuple[TopLogprob, ...]
    offset: int


class LogprobsBuffer:
    """The tokens whose text has not been shown yet."""

    def __init__(self) -> None:
        self._withheld: deque[TokenLogprob] = deque()
        self._decoded = 0  # characters of all tokens so far
        self._shown = 0  # and those of them that were shown

    def add_token(self, event: TokenEvent, piece: str) -> None:
        """Add a token; `piece` is the text that it completes, "" inside a character."""
        if event.token >= 0:
            entry = TokenLogprob(event.token, event.logprob, event.top, self._decoded)
            self._withheld.append(entry)
        self._decoded += len(piece)

    def add_prompt(self, token: int, score: PromptLogprob | None, piece: str, count: int) -> None:
        """Add a token of a prompt that is repeated in the answer. `count`: alternatives of the answer's tokens."""
        logprob, top = (None, ()) if score is None else (score.logprob, score.top[:count])
        self._withheld.append(TokenLogprob(token, logprob, top, self._decoded))
        self._decoded += len(piece)

    @property
    def withheld(self) -> int:
        """Return the number of tokens that were added and not released."""
        return len(self._withheld)

    def drop_withheld(self) -> None:
        """Forget the withheld tokens: another stream has reported them."""
        self._withheld.clear()

    def release(self, text: str, *, is_last: bool = False) -> list[TokenLogprob]:
        """Return the tokens that belong to the text shown now; with `is_last` all that are left."""
        self._shown += len(text)
        released = []
        while self._withheld and (is_last or self._withheld[0].offset < self._shown):
            released.append(self._withheld.popleft())
        return released
