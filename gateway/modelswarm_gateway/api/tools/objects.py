"""Reads JSON objects of requests by their tables of fields. Used for tools, whose errors need exact paths."""

from __future__ import annotations

import json
from typing import Any

from modelswarm_gateway.api.fields.states import FieldError, FieldTable
from modelswarm_gateway.errors import ApiError, invalid_field, invalid_request

MAX_JSON_BYTES = 256 << 10  # of tools, and of variables of the chat template
MAX_DOCUMENT_BYTES = 2 << 20  # of all documents of a chat: a prompt may have no more characters


def read_object(path: str, value: object, table: FieldTable) -> dict[str, Any]:
    """Return the fields that are set. Raise ApiError for anything but an object of these fields."""
    if not isinstance(value, dict):
        raise invalid_request(path, f"{path}: must be an object")
    try:
        return table.take(value)
    except FieldError as error:
        path = f"{path}.{error.field}"
        raise ApiError(error.code, f"{path}: {error.problem}", param=path) from error


def read_text(path: str, fields: dict[str, Any], name: str) -> str:
    """Return a required field, a string that is not empty."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise invalid_request(f"{path}.{name}", f"{path}.{name}: must be a string, not empty")
    return value


def check_type(path: str, fields: dict[str, Any]) -> None:
    if fields.get("type", "function") != "function":
        raise invalid_request(f"{path}.type", f'{path}.type: must be "function"')


def check_size(path: str, value: object, most: int = MAX_JSON_BYTES) -> None:
    """Raise ApiError for more than `most` bytes of JSON, which would be kept for as long as the answer takes."""
    try:
        text = json.dumps(value, ensure_ascii=False) if value else ""
    except RecursionError as error:
        raise invalid_field(path, "nested too deeply") from error
    if len(text.encode(errors="surrogatepass")) > most:
        raise invalid_field(path, f"at most {most >> 10} KiB of JSON")
