"""The engine of a pipeline against a gateway that does not answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import count

import pytest

from modelswarm.client.answer_rows import AnswerRows
from modelswarm.client.api import (
    AsyncClient,
    GatewayUnreachableError,
    PermissionDeniedError,
    ServedModel,
    ServiceUnavailableError,
)
from modelswarm.client.api.errors import ErrorFacts
from modelswarm.client.pipeline.engine import Job, PipelineEngine
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.prompts import Prompt
from modelswarm.client.pipeline.response import Response, failed
from modelswarm.client.pipeline.runs import BatchRun
from modelswarm.errors import UserError

NOTHING = "http://127.0.0.1:1"


def make_engine(progress_timeout: float) -> tuple[PipelineEngine, count[int]]:
    """Return an engine whose clock goes on by a second at every look."""
    seconds = count()
    client = AsyncClient(NOTHING, max_retries=0)
    model = ServedModel("model", 100)
    rows = AnswerRows(NOTHING)
    engine = PipelineEngine(client, model, 2, progress_timeout, rows, lambda: float(next(seconds)))
    return engine, seconds


async def test_unreachable_gateway_fails_a_prompt_after_the_timeout() -> None:
    engine, seconds = make_engine(progress_timeout=3)

    with pytest.raises(GatewayUnreachableError, match=NOTHING):
        await engine.answer(Job(0, Prompt(text="a"), GenerationConfig(), 1))

    assert next(seconds) > 4  # it was tried again meanwhile
    await engine.close()


@pytest.mark.parametrize("ask", [PipelineEngine.answer, PipelineEngine.score])
async def test_answers_raise_the_limit_that_a_refusal_lowered(
    ask: Callable[[PipelineEngine, Job], Awaitable[Response | float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(progress_timeout=3)

    async def attempt(job: Job) -> AsyncGenerator[Response, None]:
        yield Response("a", 1, 1, index=job.index)

    monkeypatch.setattr(engine, "_ask", attempt)
    monkeypatch.setattr(engine, "_score", attempt)
    engine._admission.lower_limit()
    assert engine._admission.limit == 1
    assert await ask(engine, Job(7, Prompt(text="a"), GenerationConfig(), 1)) == Response(
        "a", 1, 1, index=7
    )
    assert engine._admission.limit == engine.most
    await engine.close()


def test_errors_have_the_code_of_the_gateway_or_of_their_kind() -> None:
    lost = ServiceUnavailableError("no server", ErrorFacts(503, "no_servers"))
    broken = GatewayUnreachableError("no gateway", NOTHING)
    codes = [
        failed(0, error).error_code
        for error in (lost, broken, UserError("prompts", "bad"), PermissionDeniedError("no"))
    ]

    assert codes == ["no_servers", "connection_broken", "invalid_request", None]


async def test_errors_are_responses_of_a_run_that_raises_none() -> None:
    engine, _ = make_engine(progress_timeout=0)
    jobs = [Job(place, Prompt(text="a"), GenerationConfig(), 1) for place in range(5)]
    run = BatchRun(engine, jobs, raises=False)

    await run.run.execute()

    assert sorted(run.responses) == list(range(5))
    assert all(
        isinstance(response.error, GatewayUnreachableError) for response in run.responses.values()
    )
    await engine.close()
