"""The output of one turn, made of its tokens: text, stop strings, typed events, log probabilities, rows.

Used by a generation. Knows no session and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelswarm.protocol.messages import Finish, PromptLogprob, Sampling
from modelswarm.protocol.opaque import without_opaque
from modelswarm_gateway.backend.token_stream import RowsEvent, TokenEvent
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.generation.output.logprobs import LogprobsBuffer, TokenLogprob
from modelswarm_gateway.generation.output.stop_strings import StopMatcher
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.resumption import LogMark
from modelswarm_gateway.generation.rows.returned_rows import RowBlock, RowsBuffer
from modelswarm_gateway.generation.tool_calls.answer import (
    PROMPT_END_TOKENS,
    AnswerParser,
    has_events,
)
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    TextDelta,
    merge_events,
)
from modelswarm_gateway.generation.tool_calls.families import ChatFormat
from modelswarm_gateway.models.detokenizer import detokenize_all
from modelswarm_gateway.models.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Generated text (perhaps empty), the tokens that made it, and the finish reason of the last chunk.

    With log probabilities, tokens whose text is withheld come with a later chunk: a stream that is resumed behind this
    one must report theirs.
    """

    text: str
    tokens: tuple[int, ...]
    position: int  # of the first token
    end: int  # position after the last token
    received: int  # position after the last token that has come, withheld or not
    finish: str | None
    mark: str  # short hash of the log up to `end`; "" for a session without a name
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that belong to `text`, if requested
    events: tuple[OutputEvent, ...] | None = None  # None: the answer is nothing but its text
    rows: RowBlock | None = None  # of entries below `end`, and at the end of the answer all

    @property
    def output(self) -> tuple[OutputEvent, ...]:
        """Return what the client may see now, as typed events."""
        if self.events is not None:
            return self.events
        return (TextDelta(self.text),) if self.text else ()


class TurnOutput:
    """Takes the tokens of a turn in order, and makes chunks of what they show."""

    def __init__(
        self,
        request: GenerationRequest,
        turn: TurnRequest,
        sampling: Sampling,
        tokenizer: ModelTokenizer,
        form: ChatFormat,
        rows: RowsBuffer | None,
        stop_at: Callable[[int], None],
    ) -> None:
        """`turn` has the whole prompt. `form`: of tool calls and reasoning. `rows`: None if none are returned.

        `stop_at(position)` is called when the answer ends before the tokens of the turn do.
        """
        self._request, self._prompt, self._sampling = request, turn.tokens, sampling
        self._tokenizer, self._rows, self._stop_at = tokenizer, rows, stop_at
        last = without_opaque(turn.tokens[-PROMPT_END_TOKENS:])
        self._answer = self._parser(form, last)
        markers = form.markers if self._answer else ()
        text = request.text
        self._detokenizer = tokenizer.detokenizer(last, markers, all_special=text.all_special)
        self._stops = StopMatcher(
            request.stop, keeps_match=text.keeps_stop, min_pieces=sampling.min_tokens
        )
        self._log_mark = LogMark(turn.tokens) if request.session_id else None
        self._withheld: list[int] = []  # tokens that came and are in no chunk yet
        self._events: list[OutputEvent] = []  # of the next chunk
        self._logprobs = LogprobsBuffer() if turn.keeps_logprobs else None
        self._released: list[TokenLogprob] = []  # of the next chunk
        self.finish: str | None = None  # the finish reason, once the turn has completed

    def _parser(self, form: ChatFormat, last: Sequence[int]) -> AnswerParser | None:
        """Return the parser of the answer; None if it is plain text."""
        options = self._request.answer
        if options is None or not has_events(options, form):
            return None
        seed = self._sampling.seed + self._sampling.choice
        end = self._tokenizer.decode(last, form.markers)
        return AnswerParser(options, form, self._prompt, end, seed)

    @property
    def reasoning_tokens(self) -> int | None:
        """Return the generated tokens of the reasoning; None for plain text."""
        return None if self._answer is None else self._answer.reasoning_tokens

    @property
    def stop_match(self) -> str | None:
        """Return the stop string that has ended the answer."""
        return self._stops.match

    @property
    def rows_end(self) -> int | None:
        """Return the position after the last row that has come; None if no rows are returned."""
        return None if self._rows is None else self._rows.end

    async def echo_prompt(self, scores: Sequence[PromptLogprob]) -> str:
        """Return the prompt's text. `scores`: of its tokens from the second on, for the log probabilities."""
        detokenizer = self._tokenizer.detokenizer((), all_special=self._request.text.all_special)
        pieces = await detokenize_all(detokenizer, self._prompt)
        text = "".join(pieces)
        if self._logprobs is not None:
            for token, score, piece in zip(self._prompt, [None, *scores], pieces, strict=True):
                self._logprobs.add_prompt(token, score, piece, self._sampling.logprobs)
            self._released += self._logprobs.release(text, is_last=True)
        return text

    def add_rows(self, event: RowsEvent) -> None:
        """Add rows, which come before the token that follows them."""
        assert self._rows is not None
        self._rows.put_rows(event)

    def add_token(self, event: TokenEvent) -> str:
        """Return the text that one token makes visible. Set `finish` if the turn ends with it."""
        piece = self._decode(event)
        text, self.finish = self._match_stops(event, piece)
        if self._answer is not None:
            is_last = self.finish is not None
            self._events += self._answer.add_token(event.position, text, is_last=is_last)
            if self._answer.has_ended and not is_last:
                self._stop_at(event.position + 1)
                self.finish = Finish.STOP.value
        if self._logprobs is not None:
            has_cut = self._stops.match is not None and not self._request.text.keeps_stop
            is_last = self.finish is not None and not has_cut
            self._logprobs.add_token(event, piece)
            self._released += self._logprobs.release(text, is_last=is_last)
        return text

    def _decode(self, event: TokenEvent) -> str:
        piece = ""
        has_text = event.finish is not Finish.STOP or self._request.text.keeps_stop
        if event.token >= 0 and has_text:  # by default a stop token has none
            piece = self._detokenizer.feed(event.token)
        if event.finish is not Finish.NONE:
            piece += self._detokenizer.flush()
        return piece

    def _match_stops(self, event: TokenEvent, piece: str) -> tuple[str, str | None]:
        found = self._stops.feed(piece)
        if found.matched:
            if event.finish is Finish.NONE:
                self._stop_at(event.position + 1)
            return found.text, Finish.STOP.value
        if event.finish is not Finish.NONE:
            return found.text + self._stops.flush(), event.finish.value
        return found.text, None

    def skip(self, tokens: Sequence[int]) -> None:
        """Take the log's next tokens as read: they are in no chunk."""
        if self._log_mark is not None:
            self._log_mark.extend(tokens)

    def take_read(
        self, text: str, *, is_last: bool
    ) -> tuple[Sequence[OutputEvent], Sequence[TokenLogprob]]:
        """Return what the token with this text has added, which the client has; `is_last`: it has no more."""
        events = (TextDelta(text),) if self._answer is None else self._events
        logprobs, self._released, self._events = self._released, [], []
        if self._logprobs is not None and is_last:
            self._logprobs.drop_withheld()
        return events, logprobs

    def make_chunk(self, texts: Sequence[str], tokens: Sequence[int], first: int) -> OutputChunk:
        """Return the chunk of these texts and tokens, the first at position `first`, with the mark of the log."""
        received, came = first + len(tokens), [*self._withheld, *tokens]
        shown = self._count_shown(came)
        self._withheld = came[shown:]
        end = received - len(self._withheld)
        self.skip(came[:shown])
        mark = "" if self._log_mark is None else str(self._log_mark)
        logprobs, self._released = tuple(self._released), []
        events, self._events = tuple(merge_events(self._events)), []
        return OutputChunk(
            "".join(texts),
            tuple(came[:shown]),
            end - shown,
            end,
            received,
            self._finish_reason(),
            mark,
            logprobs,
            None if self._answer is None else events,
            None if self._rows is None else self._rows.take(end if self.finish is None else None),
        )

    def _count_shown(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens that have come are in this chunk."""
        if self._logprobs is None or self.finish is not None:
            return len(tokens)
        return max(0, len(tokens) - self._logprobs.withheld)

    def _finish_reason(self) -> str | None:
        has_calls = self._answer is not None and self._answer.has_calls
        return "tool_calls" if has_calls and self.finish == Finish.STOP.value else self.finish
