"""LangChain, LiteLLM and llm against a real swarm: whole answers, streams, tools, structured output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.processes.programs.client_environment import ClientEnvironment
from support.processes.streams import TOY_MODEL

pytestmark = pytest.mark.full

PACKAGES = ("langchain-openai==1.7.4", "litellm==1.110.2", "llm==0.36")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "clients.md"
TEXT = "Let me see."
CALLS = [["get_weather", {"city": "Berlin", "days": 3}], ["clock", {}]]

LANGCHAIN = """
import json, sys
from typing import Literal
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

@tool
def get_weather(city: str, days: int) -> str:
    "The weather of a city."
    return "rain"

@tool
def clock() -> str:
    "The time."
    return "noon"

class Weather(BaseModel):
    "How it is."
    is_wet: bool
    wind: Literal["calm", "storm"]

url, name = sys.argv[1:]
chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model=name, temperature=0, max_retries=0)
bound = chat.bind_tools([get_weather, clock])
answer = bound.invoke("hi")
whole = None
for part in bound.stream("hi"):
    whole = part if whole is None else whole + part
results = [get_weather.invoke(answer.tool_calls[0]), clock.invoke(answer.tool_calls[1])]
after = bound.invoke([("user", "hi"), answer, *results])
legacy = OpenAI(base_url=url + "/v1", api_key="none", model=name, temperature=0, max_tokens=5)
print(json.dumps({
    "text": answer.content,
    "calls": [[call["name"], call["args"]] for call in answer.tool_calls],
    "usage": answer.usage_metadata["output_tokens"],
    "stream": whole.content,
    "streamed_calls": [[call["name"], call["args"]] for call in whole.tool_calls],
    "after": after.content,
    "structured": {
        method: chat.with_structured_output(Weather, method=method).invoke("hi").model_dump()
        for method in ("json_schema",)
    },
    "completion": len(legacy.invoke("hi")),
}))
"""

LITELLM = """
import json, os, sys
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

url, name = sys.argv[1:]
functions = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}}},
    {"name": "clock", "parameters": {"type": "object", "properties": {}}},
]
tools = [{"type": "function", "function": each} for each in functions]
hi = [{"role": "user", "content": "hi"}]
made = {}
for provider, base in (("openai", url + "/v1"), ("hosted_vllm", url + "/v1"), ("anthropic", url)):
    common = dict(model=f"{provider}/{name}", api_base=base, api_key="none", messages=hi, tools=tools,
                  temperature=0, max_tokens=500, num_retries=0)
    whole = litellm.completion(**common)
    parts = list(litellm.completion(**common, stream=True))
    streamed = litellm.stream_chunk_builder(parts, messages=hi)
    made[provider] = [
        {
            "text": answer.choices[0].message.content,
            "calls": [[call.function.name, json.loads(call.function.arguments or "{}")]
                      for call in answer.choices[0].message.tool_calls],
            "reasoning": answer.choices[0].message.get("reasoning_content"),
            "finish": answer.choices[0].finish_reason,
        }
        for answer in (whole, streamed)
    ]
try:
    litellm.completion(model="openai/none", api_base=url + "/v1", api_key="none", messages=hi)
except litellm.NotFoundError as error:
    made["error"] = "does not exist" in str(error)
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def clients() -> ClientEnvironment:
    return ClientEnvironment(PACKAGES)


def last_line(output: str) -> Any:
    return json.loads(output.strip().splitlines()[-1])


def test_langchain_gets_text_calls_and_structures(clients: ClientEnvironment, url: str) -> None:
    made = last_line(clients.run("-c", LANGCHAIN, url, TOY_MODEL))
    assert made["text"] == made["stream"] == made["after"] == TEXT
    assert made["calls"] == made["streamed_calls"] == CALLS
    assert made["usage"] > 0 and made["completion"] > 0
    assert made["structured"]["json_schema"].keys() == {"is_wet", "wind"}


def test_litellm_gets_the_same_by_three_protocols(clients: ClientEnvironment, url: str) -> None:
    made = last_line(clients.run("-c", LITELLM, url, TOY_MODEL))
    assert made.pop("error")
    for provider, answers in made.items():
        for answer in answers:
            assert answer["text"] == TEXT, provider
            assert answer["calls"] == CALLS, provider
            assert answer["reasoning"] == "Which city?", provider
            assert answer["finish"] == "tool_calls", provider


@pytest.mark.parametrize("name", ["langchain_openai", "litellm"])
def test_example_of_the_page_prints_the_text(
    clients: ClientEnvironment, url: str, name: str
) -> None:
    (example,) = (each for each in blocks("python") if name in each)
    assert TEXT in clients.run("-c", filled(example, url))


def blocks(language: str) -> list[str]:
    """Return the page's blocks of this language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def filled(example: str, url: str) -> str:
    return example.replace("http://127.0.0.1:8000", url).replace("MODEL", TOY_MODEL)


@pytest.mark.parametrize("flags", [("--no-stream",), ()])
def test_llm_prints_the_answer(
    clients: ClientEnvironment, url: str, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (models,) = blocks("yaml")
    (tmp_path / "extra-openai-models.yaml").write_text(filled(models, url), encoding="utf-8")
    env = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    words = ("-m", "llm", "-m", "swarm", "-o", "temperature", "0", "-o", "seed", "7", *flags)
    assert clients.run(*words, "hi", env=env).startswith(TEXT)
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}
    made = clients.run(*words, "--schema", json.dumps(schema), "hi", env=env)
    assert json.loads(made).keys() == {"wet"}
