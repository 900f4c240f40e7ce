"""One function that a model may call, as the parsers, the grammar and the template of chats take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    description: str | None = None
    is_strict: bool = False  # its arguments must follow the schema
    param: str = field(default="tools", compare=False)  # of the schema in the request, for errors

    def template_value(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: OpenAI's shape, without fields that only servers read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}
