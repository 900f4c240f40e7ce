"""The parts of a stream as they come, and the answers that are whole when it is interrupted."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from modelswarm.client.pipeline.errors import PipelineInterrupted
from modelswarm.client.pipeline.response import Response, failed
from modelswarm.client.pipeline.response_stream import ResponseStream
from modelswarm.errors import UserError

KEPT = Response("kept", 1, 1, "stop", index=3)


def interrupted_parts() -> Generator[Response, None, None]:
    """Yield one whole answer, a failure, and the beginning of a third answer; then Ctrl-C comes."""
    yield Response("a", 1, 2, None, [5], [{5: -1.0}], index=1)
    yield failed(0, UserError("prompts", "bad"))
    yield Response("c", 1, 2, None, [6], index=2)
    yield Response("b", 2, 2, "stop", [7], [{7: -2.0}], index=1, cached_tokens=1)
    raise KeyboardInterrupt


def test_ctrl_c_says_which_answers_are_whole() -> None:
    ends: list[str] = []
    stream = ResponseStream(interrupted_parts(), lambda: ends.append("ended"), {3: KEPT}, 5)

    with pytest.raises(PipelineInterrupted, match="3 of 5 prompts are done; call again") as caught:
        list(stream)

    assert ends == ["ended"]
    whole = Response("ab", 2, 2, "stop", [5, 7], [{5: -1.0}, {7: -2.0}], index=1, cached_tokens=1)
    first, *others = caught.value.responses
    assert first is not None and first.error_code == "invalid_request"
    assert others == [whole, None, KEPT, None]
    assert stream.responses == caught.value.responses


def test_interrupt_before_any_answer_gives_no_advice() -> None:
    assert str(PipelineInterrupted([None])) == "interrupted: 0 of 1 prompts are done"
