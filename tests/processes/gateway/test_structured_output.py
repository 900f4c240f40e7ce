"""Structured output over HTTP on a real swarm: every field, refusals, a lost tail, sessions side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running, local_settings, metrics, running_swarm, total

WORD = {"type": "string", "maxLength": 40}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": WORD, "minItems": 6, "maxItems": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["names", "age", "kind"],
    "additionalProperties": False,
}
SPACED = {f"[{before}1{after}]" for before in ("", " ") for after in ("", " ")}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": SCHEMA},
}


@pytest.fixture(scope="module")
def swarm(toy_folder: Path) -> Iterator[Running]:
    settings = local_settings("grammar")
    with running_swarm(toy_folder, "grammar", spans=2, replicas=2, settings=settings) as running:
        yield running


def _body(**fields: Any) -> dict[str, Any]:
    return {
        "model": TOY_MODEL,
        "prompt": "go",
        "max_tokens": 600,
        "temperature": 1,
        "seed": 5,
        **fields,
    }


def _post(swarm: Running, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"http://{swarm.local.http}/v1/completions", json=_body(**fields), timeout=300
    )


def _answer(swarm: Running, **fields: Any) -> tuple[str, str]:
    answer = _post(swarm, **fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_schema_holds_for_a_random_model(swarm: Running, seed: int) -> None:
    text, finish = _answer(swarm, response_format=FORMAT, seed=seed)
    assert finish == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


def _tail_steps(swarm: Running) -> int:
    """Return the number of steps of all tails."""
    tails = (each for each in swarm.members() if each.first > 0)
    name = "modelswarm_server_step_seconds_count"
    return int(sum(total(metrics(each.metrics), name) for each in tails))


@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.full), 1])
def test_forced_tokens_save_steps_and_change_no_answer(swarm: Running, temperature: int) -> None:
    """An answer with log probabilities has a step for each token, so that each has one."""
    made, steps = [], []
    for fields in ({}, {"logprobs": 0}):
        before = _tail_steps(swarm)
        answer = _post(swarm, response_format=FORMAT, temperature=temperature, **fields).json()
        made.append((answer["choices"][0]["text"], answer["usage"]))
        steps.append(_tail_steps(swarm) - before)
    assert made[0] == made[1]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) >= steps[1] - 2
    assert all(each < 0 for each in answer["choices"][0]["logprobs"]["token_logprobs"])
    assert steps[0] + 20 < steps[1]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_regex": "[ab]{3}"}, {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        ({"structured_outputs": {"choice": ["ja", "nein"]}}, {"ja", "nein"}),
        ({"guided_choice": ["é", "😀"]}, {"é", "😀"}),
        ({"guided_grammar": 'start: "x" | "yz"'}, {"x", "yz"}),
        ({"grammar": 'root ::= "x" | "yz"'}, {"x", "yz"}),
        ({"guided_json": {"const": [1, {"a": None}]}}, {'[1,{"a":null}]'}),
        ({"guided_json": {"const": [1]}, "guided_whitespace_pattern": " "}, SPACED),
    ],
)
def test_field_constrains_the_answer(
    swarm: Running, fields: dict[str, Any], allowed: set[str]
) -> None:
    text, finish = _answer(swarm, **fields)
    assert text in allowed
    assert finish == "stop"


def test_answer_that_cannot_end_finishes_with_length(swarm: Running) -> None:
    text, finish = _answer(swarm, guided_regex="a{100}", max_tokens=7)
    assert (text, finish) == ("aaaaaaa", "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "strnig"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
def test_wrong_grammar_is_refused_before_a_session(
    swarm: Running, fields: dict[str, Any], param: str
) -> None:
    answer = _post(swarm, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_grammar_too_complex_later_ends_its_session_only(swarm: Running) -> None:
    """The pattern passes the check, and exceeds llguidance's limits some tokens later."""
    bomb = {"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"}
    with ThreadPoolExecutor(2) as pool:
        free = pool.submit(_answer, swarm, max_tokens=200, ignore_eos=True)
        answer = _post(swarm, guided_json=bomb)
        assert answer.status_code >= 500
        assert "grammar cannot be followed" in answer.json()["error"]["message"]
        assert free.result()[1] == "length"


@pytest.mark.full
def test_kill_of_the_tail_changes_no_token_of_json(swarm: Running) -> None:
    calm, _ = _answer(swarm, response_format=FORMAT, seed=11)
    swarm.wait_whole()
    before = swarm.faults().resumed
    url, parts = f"http://{swarm.local.http}/v1/completions", list[str]()
    body = _body(response_format=FORMAT, seed=11, stream=True)
    with httpx.stream("POST", url, json=body, timeout=300) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if len(parts) == 20:
                    swarm.kill(swarm.only_session().route[-1].peer)
    assert swarm.faults().resumed == before + 1
    assert "".join(parts) == calm
    jsonschema.validate(json.loads(calm), SCHEMA)
    swarm.wait_whole()


@pytest.mark.full
def test_sessions_side_by_side_equal_those_alone(swarm: Running) -> None:
    kinds: list[dict[str, Any]] = [
        {"response_format": FORMAT},
        {"max_tokens": 60},
        {"guided_regex": "[0-9]{40}"},
        {"guided_choice": ["ja", "nein"]},
    ]
    alone = [_answer(swarm, **kind) for kind in kinds]
    with ThreadPoolExecutor(8) as pool:
        both = list(pool.map(lambda kind: _answer(swarm, **kind), [*kinds, *kinds]))
    assert both == [*alone, *alone]


def test_openai_client_parses_into_its_model(swarm: Running) -> None:
    class Point(BaseModel):
        x: int
        on: bool

    with openai.OpenAI(
        base_url=f"http://{swarm.local.http}/v1", api_key="none", max_retries=0
    ) as client:
        made = client.chat.completions.parse(
            model=TOY_MODEL,
            messages=[{"role": "user", "content": "a point"}],
            response_format=Point,
            temperature=0,
            max_tokens=200,
        )
    assert isinstance(made.choices[0].message.parsed, Point)


def test_examples_of_the_page_answer_as_it_says(swarm: Running) -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
    page = page.split("\n## Structured output\n")[1].split("\n## ")[0]
    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    assert len(examples) == 4
    texts = []
    for body in examples:
        answer = httpx.post(f"http://{swarm.local.http}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    point, choice, date, total = texts
    assert json.loads(point).keys() == {"x", "on"}
    assert choice in ("yes", "no")
    assert re.fullmatch(r"[0-9]{4}-[01][0-9]", date)
    assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})?", total)


def test_examples_of_the_http_section_are_answered(swarm: Running) -> None:
    """The page's other requests: the example of beams runs in structured/test_beams.py."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
    section = page.split("\n## HTTP (port 8000)\n")[1].split("\n## ")[0]
    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", section, re.DOTALL)]
    posted = [body for body in examples if "num_beams" not in body]
    assert len(posted) == len(examples) - 1 == 2
    for body in posted:
        path = "chat/completions" if "messages" in body else "completions"
        answer = httpx.post(f"http://{swarm.local.http}/v1/{path}", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == (1 if "messages" in body else len(body["prompt"]))


def test_stop_string_before_the_last_token_ends_the_log(swarm: Running) -> None:
    """The forced tokens come together, so the turn has ended before its stop string is found."""
    fields = {"guided_choice": ["abcdef"], "stop": ["b"], "max_tokens": 4, "session_id": "stopped"}
    answer = _post(swarm, **fields).json()
    state = httpx.get(f"http://{swarm.local.http}/v1/sessions/stopped", timeout=60).json()

    assert answer["choices"][0]["text"] == "a"
    assert state["position"] == answer["usage"]["total_tokens"]
