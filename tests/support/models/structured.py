"""A model that writes nonsense in the form of Hermes' calls, and tools for it, for tests of constrained answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models.scripted import make_scripted_model
from support.processes.streams import TOY_MODEL

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% endfor %}<|assistant|>{# <think></think><tool_call> #}"
)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# Between markers stand multiples of three characters, so that each marker is a token.
ANSWER = "<think>\nHm..\n</think>\n\nNo. <tool_call>\n{  }\n</tool_call>"
MOVE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "to": {"type": "string", "maxLength": 20},
        "steps": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 8},
        "mode": {"enum": ["fast", "slow", None]},
    },
    "required": ["to", "steps", "mode"],
    "additionalProperties": False,
}
STOP: dict[str, Any] = {
    "type": "object",
    "properties": {"hard": {"type": "boolean"}},
    "required": ["hard"],
    "additionalProperties": False,
}
SCHEMAS = {"move": MOVE, "stop": STOP}


def tool(name: str, **changes: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": SCHEMAS.get(name, {"type": "object"}), **changes}
    return {"type": "function", "function": function}


TOOLS: Any = [tool("move"), tool("stop")]
BODY: dict[str, Any] = {
    "model": TOY_MODEL,
    "messages": [{"role": "user", "content": "go"}],
    "tools": TOOLS,
    "tool_choice": "required",
    "temperature": 1,
    "max_tokens": 900,
}


def make_structured_model(folder: Path) -> Path:
    """Write the model. Its markers are special tokens. Greedily it reasons, and writes a call without a name."""
    return make_scripted_model(folder, ANSWER, TEMPLATE, markers=MARKERS)
