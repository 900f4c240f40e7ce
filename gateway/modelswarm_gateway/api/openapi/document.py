"""Builds the OpenAPI document from the app's routes and the table of operations, and serves it as `/openapi.json`.

Routes give paths and parameters, so none can be missing. Used by `app.py` of the HTTP API.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute

from modelswarm import __version__
from modelswarm_gateway.api.fields.headers import REFUSED_HEADERS
from modelswarm_gateway.api.openapi.answer_schemas import ANSWERS, Schema, refer
from modelswarm_gateway.api.openapi.message_schemas import MESSAGE_ANSWERS
from modelswarm_gateway.api.openapi.operations import ALWAYS, OPERATIONS, Operation
from modelswarm_gateway.api.openapi.request_schemas import body_schemas
from modelswarm_gateway.api.openapi.response_schemas import RESPONSE_ANSWERS
from modelswarm_gateway.errors import TABLE
from modelswarm_gateway.settings import SESSION_HEADER

OPENAPI_VERSION = "3.1.0"
_TEXT: Schema = {"type": "string"}
# Headers of all answers.
_HEADERS = {
    "x-request-id": "The request's id, the client's own if it sent a valid one.",
    "openai-processing-ms": "Milliseconds until the first byte.",
}
_ERROR_HEADERS = {
    "x-should-retry": "Whether the same request may succeed later.",
    "retry-after": "Seconds after which to retry, on 429, 503 and 409 `session_busy`.",
    "retry-after-ms": "The same in milliseconds.",
}
_TURN_HEADERS = {
    SESSION_HEADER: "The session; the same as `session_id`.",
    "last-event-id": "The last event of a stream that this request resumes.",
}


def add_openapi_route(app: FastAPI) -> None:
    """Add the document of all routes that the app has when it is first asked for."""

    @lru_cache(maxsize=1)
    def content() -> bytes:
        return json.dumps(build_document(app)).encode()

    @app.api_route("/openapi.json", methods=["GET", "HEAD"])
    async def openapi() -> Response:
        return Response(content(), media_type="application/json")


def build_document(app: FastAPI) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute):
            for method in sorted(route.methods or ()):
                paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, method)
    schemas = {**ANSWERS, **MESSAGE_ANSWERS, **RESPONSE_ANSWERS}
    for operation in OPERATIONS.values():
        if operation.body is not None:
            schemas |= body_schemas(operation.body)
    refused = "; ".join(f"`{name}`: {why}" for name, why in REFUSED_HEADERS.items())
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "ModelSwarm gateway",
            "version": __version__,
            "description": f"OpenAI's API over a model that is split over servers. Refused headers: {refused}.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(route: APIRoute, method: str) -> dict[str, Any]:
    key = ("GET" if method == "HEAD" else method, route.path_format)
    known = OPERATIONS.get(key, Operation(route.name.replace("_", " "), "Document"))
    made: dict[str, Any] = {
        "summary": known.summary,
        "operationId": f"{method.lower()}_{route.path_format.strip('/')}".translate(_NAMES),
        "parameters": _parameters(route, known),
        "responses": _responses(known, has_body=method != "HEAD"),
    }
    if known.body is not None:
        schema = refer(known.body.__name__)
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


_NAMES = str.maketrans({"/": "_", ".": "_", "{": None, "}": None})


def _parameters(route: APIRoute, operation: Operation) -> list[dict[str, Any]]:
    path = [
        {"name": field.alias, "in": "path", "required": True, "schema": _TEXT}
        for field in route.dependant.path_params
    ]
    query = [
        {"name": field.alias, "in": "query", "required": False, "schema": _TEXT}
        for field in route.dependant.query_params
    ]
    names = operation.headers or (_TURN_HEADERS if operation.event else {})
    headers = [
        {"name": name, "in": "header", "description": text, "schema": _TEXT}
        for name, text in names.items()
        if operation.names_session or name != SESSION_HEADER
    ]
    return path + query + headers


def _responses(operation: Operation, *, has_body: bool) -> dict[str, Any]:
    schema = refer(operation.answer)
    if operation.anthropic_answer:
        schema = {"anyOf": [schema, refer(operation.anthropic_answer)]}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if operation.event:
        text = "`data:` of each event is JSON of the schema in `x-event-schema`, an error, or `[DONE]`."
        content["text/event-stream"] = {
            "schema": {**_TEXT, "description": text},
            "x-event-schema": refer(operation.event),
        }
    found: dict[str, Any] = {"description": "The answer.", "headers": _headers(_HEADERS)}
    if has_body:
        found["content"] = content
    statuses = [200, *([operation.other_status] if operation.other_status else [])]
    made = {str(status): found for status in statuses}
    return made | _errors(operation, has_body=has_body)


def _errors(operation: Operation, *, has_body: bool) -> dict[str, Any]:
    by_status: dict[str, list[str]] = {}
    for code in dict.fromkeys((*ALWAYS, *operation.codes)):
        by_status.setdefault(str(TABLE[code].status), []).append(code.value)
    schema = refer(operation.error)
    if operation.anthropic_answer:
        schema = {"anyOf": [schema, refer("MessagesError")]}
    content = {"application/json": {"schema": schema}}
    return {
        status: {
            "description": f"error.code: {', '.join(names)}",
            "headers": _headers(_HEADERS | _ERROR_HEADERS),
            **({"content": content} if has_body else {}),
        }
        for status, names in sorted(by_status.items())
    }


def _headers(texts: dict[str, str]) -> dict[str, Any]:
    return {name: {"description": text, "schema": _TEXT} for name, text in texts.items()}
