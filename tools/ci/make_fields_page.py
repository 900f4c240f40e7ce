"""Write docs/reference/fields.md: every field of every request of the HTTP API, with its state.

    python tools/ci/make_fields_page.py

A test compares the page with this program's output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "gateway")]  # run as a script, they are not found otherwise

from modelswarm_gateway.api.fields.headers import REFUSED_HEADERS  # noqa: E402
from modelswarm_gateway.api.fields.messages import ANTHROPIC_TABLES  # noqa: E402
from modelswarm_gateway.api.fields.openai import TABLES  # noqa: E402
from modelswarm_gateway.api.fields.responses import TABLES as RESPONSES_TABLES  # noqa: E402
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

Every field of OpenAI's requests, and those that vLLM, SGLang, llama.cpp and Hugging Face's `GenerationConfig` add.
[api.md](../api.md) explains the obeyed ones.

- **obeyed**: the field has an effect. The last column has its allowed values.
- **refused**: 400 with the field's name in `param`, unless the value changes nothing. Null is always accepted.
- **no effect**: accepted with any value, because it does not concern the answer.

A field that is in no table is refused, with the nearest known name as a hint.
"""


def render_page() -> str:
    parts = [INTRODUCTION]
    for table in (*TABLES, TOKENIZE, DETOKENIZE):
        parts += [f"## {_title(table)}\n", *_rows(table, ALLOWED), ""]
    for table in RESPONSES_TABLES:
        parts += [f"## {_title(table)}\n", *_rows(table, RESPONSES_ALLOWED), ""]
    for table, words in ANTHROPIC_TABLES:
        parts += [f"## {_title(table)}\n", *_rows(table, {**MESSAGES_ALLOWED, **words}), ""]
    parts += ["## Headers\n", "| header | state | reason |", "|---|---|---|"]
    parts += [f"| `{name}` | refused | {reason} |" for name, reason in REFUSED_HEADERS.items()]
    parts += ["", "Below `/v1/messages`:\n", "| header | allowed values |", "|---|---|"]
    parts += [f"| `anthropic-version` | {', '.join(VERSIONS)} |"]
    parts += [
        "| `anthropic-beta` | names, each with any date, that change nothing; see the next table |"
    ]
    parts += ["", "| beta | why it changes nothing |", "|---|---|"]
    parts += [f"| `{name}` | {reason} |" for name, reason in HARMLESS_BETAS.items()]
    return "\n".join(parts) + "\n"


def _title(table: FieldTable) -> str:
    return f"`{table.of}`" if "/" in table.of or "_" in table.of else table.of.capitalize()


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
            values = " or ".join(f"`{json.dumps(value)}`" for value in harmless)
            return "refused", f"{reason}; {values} changes nothing" if values else reason
        case NoEffect(reason):
            return "no effect", reason
        case Renamed(wanted):
            return "refused", f"use `{wanted}`; the same value under both names is accepted"


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
