"""The fields of a request that constrain its answer: OpenAI's response_format, and vLLM's and llama.cpp's names.

Used by the APIs. At most one of them may be set. Every part of a field has an effect, or is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from modelswarm_gateway.errors import invalid_field
from modelswarm_gateway.generation.grammar.schema_checks import SchemaError, dump_schema
from modelswarm_gateway.generation.grammar.source import (
    MAX_SOURCE_BYTES,
    GrammarKind,
    GrammarSource,
)

GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
)
"""Fields of which at most one may be set."""
MAX_CHOICES = 10_000
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WHITESPACE_BYTES = 256
_Reader: TypeAlias = Callable[[str, Any], GrammarSource | None]


def read_grammar(fields: Mapping[str, Any]) -> GrammarSource | None:
    """Return the grammar that the fields ask for; None without one. Raise ApiError. Null means unset.

    Objects have only fields that have an effect: `api/fields/formats.py` has checked their names.
    """
    found = [
        source
        for name in GRAMMAR_FIELDS
        if fields.get(name) is not None
        and (source := _READERS[name](name, fields[name])) is not None
    ]
    if len(found) > 1:
        first, second = found[0].param.split(".")[0], found[1].param.split(".")[0]
        raise invalid_field(second, f"{first} constrains the answer already; give one of the two")
    source = found[0] if found else None
    pattern = fields.get("guided_whitespace_pattern")
    if pattern is not None:
        source = _with_whitespace(source, "guided_whitespace_pattern", pattern)
    if source is not None and fields.get("ignore_eos"):
        detail = f"an answer with {source.param.split('.')[0]} ends by itself; leave ignore_eos out"
        raise invalid_field("ignore_eos", detail)
    return source


def _response_format(param: str, value: Any) -> GrammarSource | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _any_object(param, True)
    if kind == "structural_tag":
        return _structural_tag(param, value)
    if kind != "json_schema":
        detail = 'must be an object whose type is "text", "json_object", "json_schema" or "structural_tag"'
        raise invalid_field(param, detail)
    param = f"{param}.json_schema"
    body = value.get("json_schema")
    if not isinstance(body, dict):
        raise invalid_field(param, "must be an object with a name and a schema")
    name, strict = body.get("name"), body.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid_field(
            f"{param}.name", "must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -"
        )
    if not isinstance(strict, bool | None):
        raise invalid_field(f"{param}.strict", "must be true or false")
    return _schema(f"{param}.schema", body.get("schema"), strict=bool(strict))


def _structured_outputs(param: str, value: Any) -> GrammarSource | None:
    """Read vLLM's StructuredOutputsParams."""
    given = dict(value)
    options = {name: given.pop(name, None) for name in _OPTIONS}
    if len(given) != 1:
        if not given and not any(options.values()):
            return None
        raise invalid_field(param, f"needs exactly one of {', '.join(_PARTS)}")
    ((name, part),) = given.items()
    source = _PARTS[name](f"{param}.{name}", part)
    if not isinstance(options["disable_any_whitespace"], bool | None):
        raise invalid_field(f"{param}.disable_any_whitespace", "must be true or false")
    if options["whitespace_pattern"] is not None:
        if options["disable_any_whitespace"]:
            detail = "disable_any_whitespace allows no whitespace; give one of the two"
            raise invalid_field(f"{param}.whitespace_pattern", detail)
        pattern = options["whitespace_pattern"]
        return _with_whitespace(source, f"{param}.whitespace_pattern", pattern)
    if options["disable_any_whitespace"] is False and source is not None:
        return replace(source, whitespace=None)
    return source


def _with_whitespace(source: GrammarSource | None, param: str, pattern: object) -> GrammarSource:
    if not isinstance(pattern, str) or not 0 < len(pattern) <= _WHITESPACE_BYTES:
        raise invalid_field(param, f"must be a regex of 1 to {_WHITESPACE_BYTES} characters")
    if source is None or source.kind is not GrammarKind.JSON_SCHEMA:
        raise invalid_field(param, "needs a JSON schema, whose whitespace it describes")
    return replace(source, whitespace=pattern)


def _json(param: str, value: Any) -> GrammarSource:
    if isinstance(value, str):
        if len(value) > MAX_SOURCE_BYTES:
            raise invalid_field(param, f"has more than {MAX_SOURCE_BYTES} characters")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid_field(param, f"is not JSON: {error}") from error
    return _schema(param, value, strict=False)


def _schema(param: str, schema: Any, *, strict: bool) -> GrammarSource:
    try:
        return GrammarSource(GrammarKind.JSON_SCHEMA, dump_schema(schema, strict=strict), param)
    except SchemaError as error:
        raise invalid_field(param, str(error)) from error


def _any_object(param: str, value: Any) -> GrammarSource | None:
    if not isinstance(value, bool):
        raise invalid_field(param, "must be true or false")
    return _schema(param, {"type": "object"}, strict=False) if value else None


def _words(kind: GrammarKind) -> _Reader:
    def read(param: str, value: Any) -> GrammarSource | None:
        if not isinstance(value, str):
            raise invalid_field(param, "must be a text")
        if len(value.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
            raise invalid_field(param, f"has more than {MAX_SOURCE_BYTES} bytes")
        return GrammarSource(kind, value, param) if value else None

    return read


def _choice(param: str, value: Any) -> GrammarSource | None:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise invalid_field(param, "must be a list of texts")
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_SOURCE_BYTES:
        detail = f"{MAX_CHOICES} texts and {MAX_SOURCE_BYTES} characters in all"
        raise invalid_field(param, f"has too many choices; allowed: {detail}")
    if not value:
        return None
    return GrammarSource(GrammarKind.CHOICE, json.dumps(value), param)


def _structural_tag(param: str, value: Any) -> GrammarSource:
    """Read vLLM's structural tags: free text, with a schema after each `begin` that a trigger announces."""
    tags, triggers = (
        (value.get("structures"), value.get("triggers"))
        if isinstance(value, dict)
        else (None, None)
    )
    if not isinstance(tags, list) or not isinstance(triggers, list) or not tags or not triggers:
        raise invalid_field(param, "must be an object with structures and triggers, not empty")
    read = []
    for place, tag in enumerate(tags):
        path = f"{param}.structures[{place}]"
        if not isinstance(tag, dict) or not isinstance(tag.get("begin"), str):
            raise invalid_field(path, "must be an object with begin, schema and end")
        begin, end = tag["begin"], tag.get("end", "")
        fitting = [each for each in triggers if isinstance(each, str) and each]
        trigger = next((each for each in fitting if begin.startswith(each)), None)
        if trigger is None or not isinstance(end, str):
            raise invalid_field(
                path, "begin must start with one of the triggers, and end must be a text"
            )
        source = _json(f"{path}.schema", tag.get("schema"))
        read.append([trigger, begin, source.text, end])
    text = json.dumps(read, ensure_ascii=False)  # in which the names of tokens are found
    if len(text) > MAX_SOURCE_BYTES:
        raise invalid_field(param, f"has more than {MAX_SOURCE_BYTES} characters")
    return GrammarSource(GrammarKind.STRUCTURAL_TAG, text, param)


_PARTS: dict[str, _Reader] = {
    "json": _json,
    "regex": _words(GrammarKind.REGEX),
    "choice": _choice,
    "grammar": _words(GrammarKind.GRAMMAR),
    "json_object": _any_object,
    "structural_tag": _structural_tag,
}
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
_READERS: dict[str, _Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _words(GrammarKind.REGEX),
    "guided_choice": _choice,
    "guided_grammar": _words(GrammarKind.GRAMMAR),
    "grammar": _words(GrammarKind.GRAMMAR),
}
