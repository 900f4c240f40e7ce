"""Reads JSON objects of requests by their tables of fields. Used for tools, whose errors need exact paths."""

from __future__ import annotations

from typing import Any

from modelswarm_gateway.api.fields.states import FieldError, FieldTable
from modelswarm_gateway.errors import ApiError, invalid_request


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
