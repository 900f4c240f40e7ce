"""`/tokenize` and `/detokenize`, and the fields of prompts that decide about special tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.gateway_service import make_service_with_files
from support.models.tokenizers import BEGIN, CHAT_TEMPLATE, byte_level, encode_bytes, model_files
from tokenizers import processors

from modelswarm_gateway.api.http.app import build_http_app
from modelswarm_gateway.models.tokenizer import UNKNOWN_LIMIT
from tools.dashboard.metric_registries import MODEL

MESSAGES = [{"role": "user", "content": "hi"}]


async def make_client() -> httpx.AsyncClient:
    """Return a client of a gateway whose model begins every text with bos."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair=None, special_tokens=[("<|begin|>", BEGIN)]
    )
    files = model_files() | {"tokenizer.json": tokenizer.to_str().encode()}
    service, _ = await make_service_with_files(files)
    transport = httpx.ASGITransport(app=build_http_app(service))
    return httpx.AsyncClient(transport=transport, base_url="http://here")


async def post(path: str, **fields: Any) -> Any:
    answer = await (await make_client()).post(path, json={"model": MODEL, **fields})
    return answer.json()


async def test_text_has_the_special_tokens_of_its_tokenizer() -> None:
    made = await post("/tokenize", prompt="hi", return_token_strs=True)
    assert made["tokens"] == [BEGIN, *encode_bytes("hi")]
    assert (made["count"], made["token_strs"]) == (3, ["<|begin|>", "h", "i"])
    assert made["max_model_len"] > 0
    plain = await post("/tokenize", prompt="hi", add_special_tokens=False)
    assert (plain["tokens"], plain["token_strs"]) == (encode_bytes("hi"), None)


async def test_text_may_be_empty_or_longer_than_the_context() -> None:
    """Clients count a text to learn by how much it is too long."""
    empty = await post("/tokenize", prompt="", add_special_tokens=False, return_token_strs=True)
    assert (empty["count"], empty["tokens"], empty["token_strs"]) == (0, [], [])
    assert await post("/detokenize", tokens=[]) == {"prompt": ""}
    text = "a" * (9 * empty["max_model_len"])
    long = await post("/tokenize", prompt=text, add_special_tokens=False)
    assert long["count"] == len(text)
    assert await post("/detokenize", tokens=long["tokens"]) == {"prompt": text}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    assert "too long" in (await post("/v1/messages", **body))["error"]["message"]
    counted = await post("/v1/messages/count_tokens", messages=body["messages"])
    assert counted["input_tokens"] > len(text)


async def test_chat_is_rendered_with_the_template() -> None:
    whole = await post("/tokenize", messages=MESSAGES)
    text = (await post("/detokenize", tokens=whole["tokens"]))["prompt"]
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert "add_generation_prompt" in CHAT_TEMPLATE
    open_end = await post("/tokenize", messages=MESSAGES, add_generation_prompt=False)
    text = (await post("/detokenize", tokens=open_end["tokens"]))["prompt"]
    assert text == "<|begin|><|user|>hi<|end|>"


@pytest.mark.parametrize("text", ["I think", "I think ", " I", ""])
async def test_last_message_can_be_left_open(text: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    made = await post("/tokenize", messages=messages, continue_final_message=True)
    shown = (await post("/detokenize", tokens=made["tokens"]))["prompt"]
    assert shown == f"<|begin|><|user|>hi<|end|><|assistant|>{text}"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"promt": "a"}, "promt"),
        (
            "/tokenize",
            {
                "messages": MESSAGES,
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "none"}, "model"),
    ],
)
async def test_wrong_field_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    assert (await post(path, **fields))["error"]["param"] == param


async def test_tokens_are_bounded_while_no_server_is_linked() -> None:
    """No server tells the context then. A body has room for eight million tokens, whose text may have gigabytes."""
    service, node = await make_service_with_files(model_files())
    node.on_link_down("s0/1/x", "it ended")
    transport = httpx.ASGITransport(app=build_http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for count, status in ((UNKNOWN_LIMIT + 1, 400), (UNKNOWN_LIMIT, 200)):
            body = {"model": MODEL, "tokens": encode_bytes("a") * count}
            assert (await client.post("/detokenize", json=body)).status_code == status
