"""Input that the Python client refuses before anything is sent: the sentence names the field and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from modelswarm import AsyncClient
from modelswarm.client.api import BadRequestError, Client
from modelswarm.client.api.checks import check_prompt, check_urls

NOWHERE = "http://127.0.0.1:9"  # nothing is sent there
HI = [{"role": "user", "content": "hi"}]


def refused(call: Callable[[], object]) -> BadRequestError:
    with pytest.raises(BadRequestError) as error:
        call()
    assert error.value.status is None and str(error.value).startswith(f"{error.value.param}: ")
    return error.value


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ({5}, "prompt"),
        ([1, -2], "prompt[1]"),
        ([1, 2.0], "prompt[1]"),
        ([True], "prompt[0]"),
        (["a", "b"], "prompt[0]"),
    ],
)
def test_wrong_prompt_is_refused(prompt: Any, param: str) -> None:
    client = AsyncClient(NOWHERE)
    assert refused(lambda: client.stream_complete(prompt)).param == param


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": -1}, "max_tokens", "whole number from 0"),
        ({"max_tokens": 1.5}, "max_tokens", "whole number from 0"),
        ({"n": 0}, "n", "whole number from 1"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "did you mean max_tokens?"),
        ({"max_new_tokens": 5}, "max_new_tokens", "did you mean max_tokens?"),
        ({"temperature": float("nan")}, "temperature", "must be a number, not nan"),
        ({"top_p": float("inf")}, "top_p", "must be a number, not inf"),
        ({"stream": True}, "stream", "the method decides it"),
        ({"stream_options": {}}, "stream_options", "always asks for the usage"),
        ({"session_id": ""}, "session_id", "1 to 256 characters"),
        ({"append": True}, "append", "needs session_id"),
        ({"stop_token_ids": "5"}, "stop_token_ids", "list of token ids"),
        ({"tools": []}, "tools", "unknown field of stream_complete"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], param: str, says: str) -> None:
    client = AsyncClient(NOWHERE)
    error = refused(lambda: client.stream_complete("go", **fields))
    assert error.param == param and says in str(error)


@pytest.mark.parametrize("messages", ["hi", {}, [], [5], [{"content": "hi"}]])
def test_wrong_messages_are_refused(messages: Any) -> None:
    client = AsyncClient(NOWHERE)
    assert "messages" in str(refused(lambda: client.stream_chat(messages)))


def test_synchronous_client_refuses_the_same() -> None:
    with Client(NOWHERE) as client:
        unknown: Any = {"temprature": 1}
        assert refused(lambda: client.chat(HI, **unknown)).param == "temprature"
        assert refused(lambda: client.stream_complete("")).param == "prompt"
        assert refused(lambda: client.open_session(1)).param == "max_length"
        assert refused(lambda: client.fork_session("a", position=0)).param == "position"
        assert refused(lambda: client.close_session("")).param == "session_id"
        assert refused(lambda: client.detokenize([-1])).param == "token_ids[0]"
        assert refused(lambda: client.complete("go", model="")).param == "model"
        odd: Any = {"logit_bias": {5: object()}}
        assert refused(lambda: client.complete("go", model="m", **odd)).param == "logit_bias"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gateway:8000",
        "ftp://a",
        "http://",
        "http://a:99999",
        "http://a b",
        "http://a\tb",
        [],
        5,
        b"http://a",
        {"http://a"},
        [NOWHERE, 5],
    ],
)
def test_wrong_url_is_refused(url: Any) -> None:
    assert refused(lambda: AsyncClient(url)).param == "base_url"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", 0),
        ("timeout", "x"),
        ("timeout", True),
        ("max_retries", -1),
        ("max_connections", 0),
        ("api_key", "é"),
        ("api_key", "a\nb"),
        ("api_key", ""),
        ("api_key", " a"),
        ("api_key", 5),
        ("on_break", 5),
    ],
)
def test_wrong_limit_is_refused(name: str, value: Any) -> None:
    limits: Any = {name: value}
    assert refused(lambda: AsyncClient(NOWHERE, **limits)).param == name
    assert refused(lambda: Client(NOWHERE, **limits)).param == name


def test_urls_come_from_argument_environment_or_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODELSWARM_URL", raising=False)
    assert check_urls(None) == ("http://127.0.0.1:8000",)
    monkeypatch.setenv("MODELSWARM_URL", "http://a:1, https://b/x/")
    assert check_urls(None) == ("http://a:1", "https://b/x")
    assert check_urls("http://c/v1") == ("http://c",), "as OpenAI's clients write it"
    assert check_urls(["http://c", "http://d"]) == ("http://c", "http://d")


def test_vectors_of_integers_are_prompts() -> None:
    assert check_prompt(np.array([1, 2], dtype=np.int32)) == [1, 2]
    assert check_prompt(range(3)) == [0, 1, 2]


def test_library_is_imported_when_it_is_used() -> None:
    program = (
        "import sys, modelswarm, modelswarm.client\n"
        "assert not {'httpx', 'torch', 'pydantic'} & set(sys.modules)\n"
        "from modelswarm import AsyncClient, Client\n"
        "assert 'httpx' in sys.modules\n"
        "assert not {'torch', 'transformers', 'grpc', 'pydantic'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
