"""The engine of a pipeline against a gateway that does not answer."""

from __future__ import annotations

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
from modelswarm.client.pipeline.response import failed
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
