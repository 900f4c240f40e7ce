"""The JSON of `plan`: every number of the plan, with the sums that its table shows."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from modelswarm.placement.plan import PAGE_SIZE, SwarmPlan
from modelswarm.placement.spans import Span
from modelswarm.resources.spec import Part


def plan_fields(plan: SwarmPlan) -> dict[str, Any]:
    """Return the plan's fields; amounts of memory in bytes."""
    shown = _fields(plan)
    del shown["spans"]  # each server has its own
    for server in shown["servers"]:
        for memory in (server["memory"], server["host"]):
            if memory is not None:
                del memory["parts"]  # the fields again, with names for people
    return shown | {"page_size": PAGE_SIZE}


def _fields(part: Any) -> dict[str, Any]:
    """Return the fields and the properties of a part of the plan, a dataclass."""
    properties = [name for name, value in vars(type(part)).items() if isinstance(value, property)]
    names = [field.name for field in fields(part)] + properties
    return {name: _value(getattr(part, name)) for name in names}


def _value(value: Any) -> Any:
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Span):
        return value._asdict()
    if isinstance(value, Part):
        return value.model_dump()
    return [_value(part) for part in value] if isinstance(value, tuple) else value
