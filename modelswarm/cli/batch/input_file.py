"""The requests of a batch: one JSON object on each line, in OpenAI's batch format. Lines are read one at a time.

The whole file is checked before anything is sent. Only a digest of each `custom_id` is kept, about 100 bytes a line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from modelswarm.errors import UserError

MAX_LINE_BYTES = 17 << 20  # the gateway's limit of a body is 16 MiB
MAX_KEPT_MODELS = 1000  # names of models that are compared with those that the gateway serves

_ALLOWED = {
    "string_type": "text",
    "string_too_short": "at least 1 character",
    "string_too_long": "at most 512 characters",
    "dict_type": "an object with the fields of the request",
}
_REFUSED_FIELDS = {
    "stream": "an answer of a batch comes as a whole; allowed: false, or no such field",
    "append": "lines of a batch have no order; allowed: the whole prompt or transcript in every line",
}


class BatchRequest(BaseModel):
    """One line of the input."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputFacts:
    """Facts about a checked input."""

    ids: frozenset[bytes]  # digests of all custom_ids
    models: dict[str, int]  # a model that lines name -> the first of these lines

    @property
    def n_lines(self) -> int:
        return len(self.ids)


def digest(custom_id: str) -> bytes:
    """Return 16 bytes that stand for a `custom_id`."""
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def check_input(path: Path) -> InputFacts:
    """Read the whole file. UserError names the first line that is wrong, and what is allowed there."""
    ids: dict[bytes, int] = {}
    models: dict[str, int] = {}
    for number, request in read_requests(path):
        first = ids.setdefault(digest(request.custom_id), number)
        if first != number:
            _refuse(path, number, f"custom_id: {request.custom_id!r} is that of line {first} too")
        model = request.body.get("model")
        if isinstance(model, str) and len(models) < MAX_KEPT_MODELS:
            models.setdefault(model, number)
    if not ids:
        raise UserError(str(path), "has no requests; allowed: one JSON object on each line")
    return InputFacts(frozenset(ids), models)


def read_requests(path: Path) -> Iterator[tuple[int, BatchRequest]]:
    """Yield the requests with the numbers of their lines, from 1. Empty lines are skipped."""
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "no such file"
        raise UserError(str(path), f"{problem}; allowed: a file with one request on each line")
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                _refuse(path, number, f"longer than {MAX_LINE_BYTES} bytes")
            if line.strip():
                yield number, _parse_request(path, number, line.rstrip(b"\r\n"))


def _parse_request(path: Path, number: int, line: bytes) -> BatchRequest:
    try:
        content = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_object_of)
    except json.JSONDecodeError as error:
        cause = f"{error.msg}, column {error.colno}"
        _refuse(path, number, f"not JSON ({cause}); allowed: one object on one line")
    except _RepeatedKeyError as error:
        _refuse(
            path, number, f"{error.args[0]}: the key is there twice; allowed: once in an object"
        )
    except (ValueError, RecursionError) as error:
        _refuse(path, number, f"not JSON ({error}); allowed: one object on one line")
    if not isinstance(content, dict):
        _refuse(path, number, "not an object; allowed: custom_id, method, url, body")
    try:
        request = BatchRequest.model_validate(content)
    except ValidationError as error:
        _refuse(path, number, _sentence(error.errors(include_url=False)[0]))
    for field, sentence in _REFUSED_FIELDS.items():
        if request.body.get(field):
            _refuse(path, number, f"body.{field}: {sentence}")
    return request


class _RepeatedKeyError(Exception):
    """An object has the same key twice; a parser would take either value."""


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(next(key for key in keys if keys.count(key) > 1))
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _sentence(detail: ErrorDetails) -> str:
    field, kind = ".".join(str(step) for step in detail["loc"]), detail["type"]
    if kind == "extra_forbidden":
        return f"{field}: unknown field; allowed: {', '.join(BatchRequest.model_fields)}"
    if kind == "missing":
        return f"{field}: required; every line has {', '.join(BatchRequest.model_fields)}"
    allowed = detail.get("ctx", {}).get("expected") or _ALLOWED.get(kind, kind.replace("_", " "))
    shown = repr(detail["input"])
    return f"{field}: {shown if len(shown) <= 60 else shown[:57] + '...'} is not allowed; allowed: {allowed}"


def _refuse(path: Path, number: int, sentence: str) -> NoReturn:
    raise UserError(f"{path}, line {number}", sentence)
