"""The openai client's asynchronous twin, its helpers `parse` and `stream`, and its raw responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel
from support.processes.programs.page_examples import python_examples, run_example
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
BODY: Any = {"model": TOY_MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


class Weather(BaseModel):
    """The answer that the model is held to."""

    is_wet: bool
    wind: Literal["calm", "storm"]


class get_weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.asyncio
async def test_async_client_streams_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**BODY)
    text = whole.choices[0].message.content
    assert text is not None and text.startswith("Let me see.")
    parts, usage = [], None
    streamed: Any = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(**streamed):
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == text
    assert usage == whole.usage


@pytest.mark.asyncio
async def test_parse_returns_an_object_of_the_schema(client: openai.AsyncOpenAI) -> None:
    made = await client.chat.completions.parse(**BODY, response_format=Weather)
    assert isinstance(made.choices[0].message.parsed, Weather)
    async with client.chat.completions.stream(**BODY, response_format=Weather) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == made.choices[0].message.parsed


@pytest.mark.asyncio
async def test_stream_helper_collects_the_calls(
    client: openai.AsyncOpenAI, running: Running
) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": get_weather.model_json_schema()},
    }
    running.wait_whole()
    async with client.chat.completions.stream(**BODY, tools=[tool]) as stream:
        final = await stream.get_final_completion()
    calls: Any = final.choices[0].message.tool_calls
    (call,) = calls
    assert get_weather.model_validate_json(call.function.arguments).days == 3
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.asyncio
async def test_raw_response_has_the_request_id(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        **BODY, extra_headers={"x-request-id": "mine"}
    )
    assert raw.request_id == "mine"
    parsed = raw.parse()
    assert parsed.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("none")
    assert [model.id async for model in client.models.list()] == [TOY_MODEL]


@pytest.mark.full
def test_example_of_tools_runs(running: Running) -> None:
    section = PAGE.split("\n## Tool calls and reasoning\n")[1].split("\n## ")[0]
    (example,) = python_examples(section)
    running.wait_whole()
    run_example(example, "127.0.0.1:8000", running.local.http)
