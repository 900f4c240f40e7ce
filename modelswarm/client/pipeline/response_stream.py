"""`ResponseStream`: the parts of answers as they come, and the answers that are whole. Made by `pipe.stream_infer`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Self

from modelswarm.client.pipeline.errors import PipelineInterrupted
from modelswarm.client.pipeline.response import Response


class ResponseStream:
    """Iterates over the parts of answers. Left early, or closed, it ends them."""

    def __init__(
        self,
        parts: Generator[Response, None, None],
        wait_ended: Callable[[], object],
        done: Mapping[int, Response],
        count: int,
    ) -> None:
        """`wait_ended` returns when nothing runs any more. `done`: answers of an earlier run, of `count` prompts."""
        self._parts, self._wait_ended, self._count = parts, wait_ended, count
        self._done = dict(done)
        self._seen: dict[int, list[Response]] = {}

    @property
    def responses(self) -> list[Response | None]:
        """The answers whose last part has come, in the order of the prompts; None for the others."""
        return [self._done.get(place) for place in range(self._count)]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Response:
        try:
            part = next(self._parts)
        except KeyboardInterrupt:
            self._wait_ended()
            raise PipelineInterrupted(self.responses) from None
        seen = self._seen.setdefault(part.index, [])
        seen.append(part)
        if part.finish_reason is not None:
            self._done[part.index] = joined(self._seen.pop(part.index))
        return part

    def close(self) -> None:
        """End the answers. May be called twice."""
        self._parts.close()


def joined(parts: Sequence[Response]) -> Response:
    """Return the whole answer of its parts, or the failure that is the last one."""
    last = parts[-1]
    if last.error is not None:
        return last
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return Response(
        text="".join(part.text for part in parts),
        generate_token_len=last.generate_token_len,
        input_token_len=last.input_token_len,
        finish_reason=last.finish_reason,
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=logprobs or None,
        index=last.index,
        cached_tokens=last.cached_tokens,
        logits=last.logits,
        last_hidden_state=last.last_hidden_state,
    )
