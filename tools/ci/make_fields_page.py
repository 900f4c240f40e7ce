"""Write docs/reference/fields.md: every field of every request of the HTTP API with its state, and those over gRPC.

    python tools/ci/make_fields_page.py

A test compares the page with this program's output.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "gateway")]  # run as a script, they are not found otherwise

from modelswarm.protocol.wire import api_pb2  # noqa: E402
from modelswarm_gateway.api.fields import formats, tools  # noqa: E402
from modelswarm_gateway.api.fields.headers import REFUSED_HEADERS  # noqa: E402
from modelswarm_gateway.api.fields.messages import ANTHROPIC_TABLES  # noqa: E402
from modelswarm_gateway.api.fields.openai import TABLES  # noqa: E402
from modelswarm_gateway.api.fields.responses import TABLES as RESPONSES_TABLES  # noqa: E402
from modelswarm_gateway.api.fields.sessions import FORKS, SESSIONS  # noqa: E402
from modelswarm_gateway.api.fields.states import (  # noqa: E402
    FieldTable,
    NoEffect,
    Obeyed,
    Refused,
    Renamed,
    State,
)
from modelswarm_gateway.api.fields.tokenization import DETOKENIZE, TOKENIZE  # noqa: E402
from modelswarm_gateway.api.http.validation_messages import ALLOWED  # noqa: E402
from modelswarm_gateway.api.messages.headers import HARMLESS_BETAS, VERSIONS  # noqa: E402
from modelswarm_gateway.api.messages.requests import MESSAGES_ALLOWED  # noqa: E402
from modelswarm_gateway.api.responses.requests import RESPONSES_ALLOWED  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "fields.md"
INTRODUCTION = """# Fields of requests

<!-- Written by tools/ci/make_fields_page.py from gateway/modelswarm_gateway/api/fields. -->

Every field of every request: those of OpenAI and Anthropic, and what vLLM, SGLang, llama.cpp and Hugging Face's
`GenerationConfig` add. [api.md](../api.md) explains the obeyed ones.

- **obeyed**: the field has an effect. The last column has its allowed values.
- **refused**: 400 with the field's name in `param`, unless the value changes nothing. Null is always accepted.
- **no effect**: accepted with any value, because it does not concern the answer.

A field that is in no table is refused, with the nearest known name as a hint. Query parameters and headers that routes
take are in the document at `/openapi.json`; unknown query parameters are refused.
"""
GRPC = """## gRPC

Every field is obeyed, or refused where it would have no effect; values and sentences are those of the HTTP API. An
unknown field number is refused. `modelswarm/protocol/wire/api.proto` explains each field.

| message | field | type |
|---|---|---|"""
SERVICE = "Inference"


def render_page() -> str:
    parts = [INTRODUCTION]
    for table in TABLES:
        parts += _section(table, ALLOWED)
    for table in tools.TOOL_TABLES:
        parts += _section(table, tools.WORDS)
    for table in formats.FORMAT_TABLES:
        parts += _section(table, formats.WORDS)
    for table in (TOKENIZE, DETOKENIZE, SESSIONS, FORKS):
        parts += _section(table, ALLOWED)
    for table in RESPONSES_TABLES:
        parts += _section(table, RESPONSES_ALLOWED)
    for table, words in ANTHROPIC_TABLES:
        parts += _section(table, {**MESSAGES_ALLOWED, **words})
    parts += _headers()
    parts += ["", GRPC, *_grpc_rows()]
    return "\n".join(parts) + "\n"


def _section(table: FieldTable, words: Mapping[str, str]) -> list[str]:
    return [f"## {_title(table)}\n", *_rows(table, words), ""]


def _headers() -> list[str]:
    parts = ["## Headers\n", "| header | state | reason |", "|---|---|---|"]
    parts += [f"| `{name}` | refused | {reason} |" for name, reason in REFUSED_HEADERS.items()]
    parts += ["", "Below `/v1/messages`:\n", "| header | allowed values |", "|---|---|"]
    parts += [f"| `anthropic-version` | {', '.join(VERSIONS)} |"]
    parts += [
        "| `anthropic-beta` | names, each with any date, that change nothing; see the next table |"
    ]
    parts += ["", "| beta | why it changes nothing |", "|---|---|"]
    return parts + [f"| `{name}` | {reason} |" for name, reason in HARMLESS_BETAS.items()]


def _title(table: FieldTable) -> str:
    """Return the name of the request or the object, with names of fields as code."""
    if "/" in table.of:
        return f"`{table.of}`"
    text = re.sub(r"\w+[_.]\w+", lambda found: f"`{found[0]}`", table.of)
    return text[0].upper() + text[1:]


def _grpc_rows() -> list[str]:
    """Return a row for each field of each message that a client sends."""
    made: list[str] = []
    for message in _messages():
        made += [
            f"| `{message.name}` | `{field.name}` | {_type(field)} |" for field in message.fields
        ]
    return made


def _messages() -> Iterator[Descriptor]:
    """Yield the requests of the service, and the messages inside them, each once."""
    service = api_pb2.DESCRIPTOR.services_by_name[SERVICE]
    waiting, seen = [method.input_type for method in service.methods], set()
    while waiting:
        message = waiting.pop(0)
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        yield message
        inside = [field.message_type for field in message.fields if field.message_type]
        waiting += [each for each in inside if not each.GetOptions().map_entry]


def _type(field: FieldDescriptor) -> str:
    if field.message_type and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map of {_type(key)} to {_type(value)}"
    kind = _SCALARS[field.type] if field.message_type is None else f"`{field.message_type.name}`"
    return f"list of {kind}" if field.is_repeated else kind


_SCALARS = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in (
        "double",
        "int32",
        "int64",
        "uint32",
        "uint64",
        "sint64",
        "bool",
        "string",
        "bytes",
    )
}


def _rows(table: FieldTable, words: Mapping[str, str]) -> list[str]:
    lines = ["| field | of | state | values, or reason |", "|---|---|---|---|"]
    for origin, section in table.sections.items():
        for name, state in section.items():
            kind, note = describe(name, state, words)
            lines.append(f"| `{name}` | {origin} | {kind} | {note} |")
    return lines


def describe(name: str, state: State, words: Mapping[str, str]) -> tuple[str, str]:
    """Return the word for a state and the note beside it."""
    match state:
        case Obeyed():
            return "obeyed", words[name].replace("|", "\\|")
        case Refused(reason, harmless):
            values = list_values(harmless)
            return "refused", f"{reason}; {values} changes nothing" if values else reason
        case NoEffect(reason):
            return "no effect", reason
        case Renamed(wanted):
            return "refused", f"use `{wanted}`; the same value under both names is accepted"


def list_values(values: Sequence[Any]) -> str:
    """Return the values; the first and the last one of a long series of numbers."""
    between = " or "
    if len(values) > 4 and list(values) == list(range(values[0], values[-1] + 1)):
        values, between = (values[0], values[-1]), " to "
    return between.join(f"`{json.dumps(value)}`" for value in values)


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
