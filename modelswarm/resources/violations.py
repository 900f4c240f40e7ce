"""Turns pydantic's errors into messages for people: `path: problem; allowed: ...`.

Used by `loading`. Knows the types through their fields; does not know files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from modelswarm.errors import DocumentError
from modelswarm.resources import rules as rules

Location = Sequence[int | str]

_ALLOWED_BY_KIND = {
    "string_type": "text (put it in quotes)",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of fields to values",
    "model_attributes_type": "a mapping of fields to values",
    "invalid_key": "a name that is text (put it in quotes)",
}
_ALLOWED_BY_FIELD = {  # for values of another type; texts are checked by their rules
    "source": rules.ADDRESSES,
    "tokenizer": rules.ADDRESSES,
    "holdLimit": rules.DURATION.allowed,
    "drainTimeout": rules.DURATION.allowed,
    "requests": rules.QUANTITY.allowed,
    "limits": rules.QUANTITY.allowed,
}


class InvalidDocumentError(DocumentError):
    """All violations of one document, each `path: sentence`."""

    def __init__(self, document: str, violations: Sequence[str]) -> None:
        listed = violations[0] if len(violations) == 1 else "\n  " + "\n  ".join(violations)
        super().__init__(document, listed)
        self.violations = tuple(violations)


def list_violations(error: ValidationError, root: type[BaseModel]) -> tuple[str, ...]:
    """Return one sentence per violation, in the order of the document's fields."""
    sentences: dict[
        str, str
    ] = {}  # a union reports a location once per branch; the first is enough
    for detail in error.errors(include_url=False, include_context=True):
        if detail["type"] == "too_short" and detail["input"]:
            continue  # pydantic counts only the valid items; an invalid one is reported by itself
        path = format_path(_without_branches(detail["loc"], root))
        sentences.setdefault(path, _describe_violation(detail, root))
    return tuple(f"{path}: {sentence}" for path, sentence in sentences.items())


def format_path(location: Location) -> str:
    """Return `spec.ranges[1].first` for `("spec", "ranges", 1, "first")`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path or "document"


def _describe_violation(detail: ErrorDetails, root: type[BaseModel]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    location = _without_branches(detail["loc"], root)
    if kind == "extra_forbidden":
        return f"unknown field; allowed: {', '.join(_fields_beside(location, root))}"
    if kind == "missing":
        return f"required. {_field_description(location, root)}"
    if kind == "modelswarm":
        return detail["msg"]
    if kind.startswith("recursion"):  # its `repr` would be as deep
        return "nested too deeply; allowed: fewer levels"
    return f"{_abbreviate(detail['input'])} is not allowed; allowed: {_describe_allowed(kind, context, location)}"


def _describe_allowed(kind: str, context: Mapping[str, Any], location: Location) -> str:
    bounds = {
        "greater_than_equal": "{ge} or more",
        "less_than_equal": "{le} or less",
        "string_too_long": "at most {max_length} characters",
        "string_too_short": "at least {min_length} character",
        "too_long": "at most {max_length} items",
        "too_short": "at least {min_length} item",
        "literal_error": "{expected}",
    }
    if kind in bounds:
        return bounds[kind].format(**context)
    name = next((step for step in reversed(location) if step in _ALLOWED_BY_FIELD), None)
    if name is not None and kind.startswith(("string", "int")):
        return _ALLOWED_BY_FIELD[str(name)]
    return _ALLOWED_BY_KIND.get(kind, kind.replace("_", " "))


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(location: Location, root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the type whose fields are at `location`; None inside free-form parts."""
    model: type[BaseModel] | None = root
    for step in location:
        if isinstance(step, int):
            continue
        model = _nested_model(model, step) if model is not None else None
    return model


def _nested_model(model: type[BaseModel], alias: str) -> type[BaseModel] | None:
    for field in model.model_fields.values():
        if field.alias == alias:
            return _first_model(field.annotation)
    return None


def _first_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _first_model(part))), None)


def _fields_beside(location: Location, root: type[BaseModel]) -> list[str]:
    model = _model_at(location[:-1], root)
    return [str(field.alias) for field in model.model_fields.values()] if model else []


def _field_description(location: Location, root: type[BaseModel]) -> str:
    model = _model_at(location[:-1], root)
    fields = model.model_fields.values() if model else ()
    return next((str(field.description) for field in fields if field.alias == location[-1]), "")


def _without_branches(location: Location, root: type[BaseModel]) -> Location:
    """Return the location without pydantic's names of union branches, such as `int` or `constrained-str`."""
    steps: list[int | str] = list(location)
    while len(steps) > 1 and steps[-1] in ("int", "str", "constrained-str", "constrained-int"):
        if _model_at(steps[:-1], root) is not None:
            break
        steps.pop()
    return steps
