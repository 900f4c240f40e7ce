"""Arguments that a pipeline refuses by name before anything is sent: nothing listens at its gateway's address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelswarm.client.answer_rows import AnswerRows
from modelswarm.client.api.answers import ServedModel
from modelswarm.client.api.async_client import AsyncClient
from modelswarm.client.api.loop_thread import LoopThread
from modelswarm.client.engine.engine import Engine
from modelswarm.client.pipeline.engine import PipelineEngine
from modelswarm.client.pipeline.opening import pipeline
from modelswarm.client.pipeline.response import Response
from modelswarm.client.pipeline.synchronous import Pipeline
from modelswarm.errors import UserError

NOTHING = "http://127.0.0.1:1"
HI = {"role": "user", "content": "Hi"}


async def make_engine() -> PipelineEngine:
    client, model = AsyncClient(NOTHING, max_retries=0), ServedModel("model", 100)
    return PipelineEngine(client, model, 2, 0.0, AnswerRows(NOTHING))


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    loop = LoopThread("pipeline")
    with Pipeline(loop, loop.call(make_engine()), None) as made:
        yield made


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (["a", "b"], "prompt"),
        ([5, 6], "prompt"),
        ([[5], [6]], "prompt"),
        ([[HI]], "prompt"),
        ([HI, "a"], "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        (HI, "prompt"),
        ([HI, {"content": "Hi"}], "prompt[1]"),
    ],
)
def test_chat_takes_one_turn(pipe: Pipeline, prompt: Any, field: str) -> None:
    session = pipe.session()

    with pytest.raises(UserError) as caught:
        pipe.chat(prompt, session)

    assert caught.value.field == field
    assert session.messages == [] and session.history == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"session": 5}, "session"),
        ({"gen_config": 5}, "gen_config"),
        ({"gen_config": []}, "gen_config"),
        ({"gen_config": 0}, "gen_config"),
        ({"stream_response": "x"}, "stream_response"),
        ({"adapter_name": 5}, "adapter_name"),
    ],
)
def test_wrong_argument_of_chat_is_refused(
    pipe: Pipeline, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError) as caught:
        pipe.chat("Hi", **arguments)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gen_config", 5),
        ("gen_config", "x"),
        ("do_preprocess", "x"),
        ("raise_errors", "x"),
        ("truncate_prompt", "x"),
        ("adapter_name", 5),
        ("done", 5),
        ("done", [5, 5]),
        ("done", {None: 1, 2: 3}),
        ("done", [Response("", 0, 0)]),
    ],
)
def test_wrong_argument_of_a_run_is_refused(pipe: Pipeline, name: str, value: Any) -> None:
    arguments: Any = {name: value}
    for verb in (pipe.infer, pipe.stream_infer):
        with pytest.raises(UserError) as caught:
            verb(["a", "b"], **arguments)
        assert caught.value.field == name


def test_switch_of_one_verb_is_refused(pipe: Pipeline) -> None:
    wrong: Any = "x"
    with pytest.raises(UserError, match=r"^use_tqdm: 'x' is not allowed; allowed: True or False$"):
        pipe("a", use_tqdm=wrong)
    with pytest.raises(UserError, match=r"^stream_response: "):
        pipe.stream_infer("a", stream_response=wrong)
    with pytest.raises(UserError, match=r"^gen_config: "):
        pipe.session(wrong)


def test_folder_without_an_adapter_is_refused_before_a_start(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"has no adapter_config\.json; allowed: a folder"
    ) as caught:
        pipeline("demo://counting", adapters={"a": str(tmp_path)})

    assert caught.value.field == "adapters"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"model_path": ""}, "model_path"),
        ({"timeout": "x"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"dtype": ""}, "dtype"),
        ({"memory": 5}, "memory"),
        ({"device": 5}, "device"),
        ({"adapters": {"a": ""}}, "adapters"),
        ({"model_path": NOTHING, "api_key": "é"}, "api_key"),
    ],
)
def test_wrong_argument_of_pipeline_is_refused(arguments: dict[str, Any], field: str) -> None:
    given: Any = {"model_path": "demo://counting", **arguments}
    for make in (pipeline, Engine):
        with pytest.raises(UserError) as caught:
            make(**given)
        assert caught.value.field == field
