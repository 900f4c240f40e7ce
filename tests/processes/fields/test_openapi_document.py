"""The OpenAPI document has every route, its references lead somewhere, and its bodies are those that are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from support.gateway_service import make_service_with_model

from modelswarm_gateway.api.fields.request_model import RequestModel
from modelswarm_gateway.api.fields.states import NoEffect, Refused, Renamed
from modelswarm_gateway.api.http.app import ROUTES, build_http_app
from modelswarm_gateway.api.http.openai_requests import ChatRequest, CompletionRequest, parse_body
from modelswarm_gateway.api.http.sessions import SessionRequest
from modelswarm_gateway.api.messages.requests import (
    CountTokensRequest,
    MessagesRequest,
    parse_count_tokens,
    parse_messages,
)
from modelswarm_gateway.api.openapi.document import build_document
from modelswarm_gateway.api.openapi.operations import OPERATIONS
from modelswarm_gateway.api.responses.requests import RESPONSES_ALLOWED, ResponsesBody
from modelswarm_gateway.api.tokenization import DetokenizeRequest, TokenizeRequest
from modelswarm_gateway.errors import ApiError

ODD = {"odd": ["value"]}
HI = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[type[RequestModel], dict[str, Any]]] = [
    (ChatRequest, {"model": "m", "messages": HI}),
    (CompletionRequest, {"model": "m", "prompt": "hi"}),
    (TokenizeRequest, {"model": "m", "prompt": "hi"}),
    (DetokenizeRequest, {"model": "m", "tokens": [1]}),
    (MessagesRequest, {"model": "m", "max_tokens": 1, "messages": HI}),
    (CountTokensRequest, {"model": "m", "messages": HI}),
    (SessionRequest, {"model": "m", "max_length": 9}),
    (ResponsesBody, {"model": "m", "input": "hi"}),
]

# Functions that read a body with words of their own for errors.
PARSERS: dict[type[RequestModel], Callable[[object], RequestModel]] = {
    MessagesRequest: parse_messages,
    CountTokensRequest: parse_count_tokens,
    ResponsesBody: lambda body: parse_body(ResponsesBody, body, RESPONSES_ALLOWED),
}
# Objects that are read behind the models.
_OF_GRAMMARS = ("response_format", "structured_outputs")
_OF_MESSAGES = ("tools", "tool_choice", "thinking", "output_config")
CHECKED_LATER: dict[type[RequestModel], tuple[str, ...]] = {
    ChatRequest: ("tools", "tool_choice", *_OF_GRAMMARS),
    CompletionRequest: _OF_GRAMMARS,
    ResponsesBody: ("input", "tools", "tool_choice", "text", "reasoning", "stream_options"),
    MessagesRequest: _OF_MESSAGES,
    CountTokensRequest: _OF_MESSAGES,
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_document(FastAPI(openapi_url=None))


def is_valid(document: dict[str, Any], name: str, value: object) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def is_parsed(model: type[RequestModel], body: dict[str, Any]) -> bool:
    try:
        parse = PARSERS.get(model)
        if parse is None:
            parse_body(model, body)
        else:
            parse(body)
    except ApiError:
        return False
    return True


def references(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        yield from (value for name, value in part.items() if name == "$ref")
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from references(each)


async def test_document_is_served_with_every_route() -> None:
    service, _ = make_service_with_model()
    transport = httpx.ASGITransport(app=build_http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        served = (await client.get("/openapi.json")).json()
        assert (await client.head("/openapi.json")).status_code == 200
    found = {
        (method.upper(), path)
        for path, operations in served["paths"].items()
        for method in operations
    }
    heads = {("HEAD", path) for method, path in found if method == "GET"}
    assert found - heads == OPERATIONS.keys(), "give every route an entry in OPERATIONS"
    assert len(found - heads) == len(ROUTES.split(", "))
    names = [
        operation["operationId"] for each in served["paths"].values() for operation in each.values()
    ]
    assert len(names) == len(set(names))


def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for reference in references(json.loads(json.dumps(document))):
        assert reference.rpartition("/")[2] in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(("model", "body"), BODIES)
def test_schema_accepts_the_bodies_that_are_parsed(
    document: dict[str, Any], model: type[RequestModel], body: dict[str, Any]
) -> None:
    name = model.__name__
    assert is_valid(document, name, body)
    assert not is_valid(document, name, {})
    assert not is_valid(document, name, body | {"no_such_field": 1})
    for field, state in model.table.states.items():
        if isinstance(state, Renamed):
            continue  # depends on the other field's value
        if field in CHECKED_LATER.get(model, ()):
            continue  # checked behind the models: test_objects_of_tools_are_described
        values: tuple[object, ...] = (ODD, -(2**70))
        values += getattr(state, "harmless", ())
        for value in (*values, *([None] if field not in body else [])):
            sent = body | {field: value}
            assert is_valid(document, name, sent) == is_parsed(model, sent), (field, value)
        assert isinstance(state, Refused | NoEffect) or field in model.model_fields


def test_objects_of_tools_are_described(document: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"model": "m", "messages": HI, "tools": [tool]}
    assert is_valid(document, "ChatRequest", body)
    assert not is_valid(document, "ChatRequest", body | {"tools": [tool | {"custom": {}}]})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert is_valid(document, "ChatMessage", message)
    assert not is_valid(document, "ChatMessage", message | {"tool_calls": [call | {"x": 1}]})
    tool = {"name": "f", "input_schema": {}}
    asked = {"model": "m", "max_tokens": 1, "messages": HI, "tools": [tool]}
    assert is_valid(document, "MessagesRequest", asked)
    assert not is_valid(document, "MessagesRequest", asked | {"tools": [tool | {"x": 1}]})
    assert not is_valid(document, "MessagesRequest", asked | {"thinking": {"budget_tokens": 9}})


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}
TAG = {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
PART = {"type": "input_text", "text": "hi"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}
# Name of the schema, a field, values that it takes, and one that it does not.
OBJECTS: list[tuple[str, str, list[Any], Any]] = [
    ("ChatRequest", "tool_choice", ["auto", NAMED, ALLOWED], ALLOWED | {"function": {}}),
    (
        "ChatRequest",
        "response_format",
        [{"type": "text"}, {"type": "json_object"}, SCHEMA, TAG | {"type": "structural_tag"}],
        {"type": "json_object", "schema": {}},
    ),
    (
        "CompletionRequest",
        "structured_outputs",
        [{"json": {}}, {"structural_tag": TAG}, {"structural_tag": "{}"}],
        {"jsn": {}},
    ),
    (
        "ResponsesBody",
        "input",
        ["hi", [*HI, {"role": "user", "content": [PART]}], [CALL]],
        [{"role": "user", "content": [PART | {"x": 1}]}],
    ),
    ("ResponsesBody", "tool_choice", ["none", {"type": "function", "name": "f"}], {"x": 1}),
    ("ResponsesBody", "reasoning", [{"effort": "low"}], {"summary": "auto"}),
    (
        "MessagesRequest",
        "messages",
        [HI, [{"role": "user", "content": [RESULT]}]],
        [{"role": "user", "content": [RESULT | {"x": 1}]}],
    ),
    ("MessagesRequest", "system", ["s", [{"type": "text", "text": "s"}]], [{"x": 1}]),
]


@pytest.mark.parametrize(("name", "field", "taken", "other"), OBJECTS)
def test_objects_inside_a_body_are_described(
    document: dict[str, Any], name: str, field: str, taken: list[Any], other: object
) -> None:
    bodies = {model.__name__: body for model, body in BODIES}
    for value in taken:
        assert is_valid(document, name, bodies[name] | {field: value}), value
    assert not is_valid(document, name, bodies[name] | {field: other})
