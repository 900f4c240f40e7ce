"""The fields of requests that constrain answers: what is read, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelswarm_gateway.api.fields.formats import take_formats
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.grammar.request_fields import read_grammar
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarSource
from modelswarm_gateway.models.token_table import TokenTable, pack_table

OBJECT = {"type": "object"}


def _format(**changes: Any) -> dict[str, Any]:
    body = {"name": "answer", "schema": OBJECT, "strict": True} | changes
    return {"response_format": {"type": "json_schema", "json_schema": body}}


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def _source(fields: dict[str, Any]) -> GrammarSource:
    source = read_grammar(take_formats(fields))
    assert source is not None
    return source


@pytest.mark.parametrize(
    "fields",
    [
        _format(),
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": OBJECT}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json": OBJECT},
        {"guided_json": json.dumps(OBJECT)},
    ],
)
def test_json_field_becomes_schema(fields: dict[str, Any]) -> None:
    source = _source(fields)
    assert source.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(source.text) == OBJECT
    assert source.whitespace == ""


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["a", "é"]}, GrammarKind.CHOICE, json.dumps(["a", "é"])),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, '["a"]'),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.GRAMMAR, 'start: "a"'),
        ({"grammar": 'root ::= "a"'}, GrammarKind.GRAMMAR, 'root ::= "a"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.GRAMMAR, 'start: "a"'),
    ],
)
def test_field_becomes_source(fields: dict[str, Any], kind: GrammarKind, text: str) -> None:
    source = _source(fields)
    assert (source.kind, source.text) == (kind, text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None}},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": None, "guided_regex": "", "guided_choice": []},
    ],
)
def test_field_without_effect_constrains_nothing(fields: dict[str, Any]) -> None:
    assert read_grammar(take_formats(fields)) is None


def test_whitespace_options_reach_the_source() -> None:
    any_space = {"json": OBJECT, "disable_any_whitespace": False}
    assert _source({"structured_outputs": any_space}).whitespace is None
    pattern = {"guided_json": OBJECT, "guided_whitespace_pattern": "[ ]?"}
    assert _source(pattern).whitespace == "[ ]?"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (_format(schema={"foo": 1}), "response_format.json_schema.schema", "'foo'"),
        (_format(schema={"items": {"foo": 1}}), "response_format.json_schema.schema", "'foo'"),
        (
            _format(schema={"nullable": True}),
            "response_format.json_schema.schema",
            "'nullable' is not a keyword of a strict schema",
        ),
        (
            {"guided_json": {"items": {"const": 2**53 + 1}}},
            "guided_json",
            "const: 9007199254740993 is",
        ),
        ({"guided_json": {"enum": [{"id": [-(2**60)]}]}}, "guided_json", "beyond 2^53"),
        ({"guided_json": '{"minimum": 1e400}'}, "guided_json", "infinite"),
        (_format(name=""), "response_format.json_schema.name", "1 to 64"),
        (_format(schema=None), "response_format.json_schema.schema", "JSON object"),
        (_format(strict="yes"), "response_format.json_schema.strict", "true or false"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": [1]}, "guided_json", "JSON object"),
        ({"guided_json": _deep(200)}, "guided_json", "64 levels"),
        ({"guided_json": {"enum": ["x" * (1 << 20)]}}, "guided_json", "allowed: 262144"),
        ({"guided_regex": "x" * (1 << 20)}, "guided_regex", "262144 bytes"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
        (_format() | {"guided_json": OBJECT}, "guided_json", "response_format"),
        ({"guided_json": OBJECT, "ignore_eos": True}, "ignore_eos", "guided_json"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, None, "needs a JSON schema"),
        ({"structured_outputs": {"json": OBJECT, "regex": "a"}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"jsn": OBJECT}}, "structured_outputs.jsn", "mean json?"),
        (
            {"structured_outputs": {"json": OBJECT, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "additionalProperties: false",
        ),
    ],
)
def test_wrong_field_is_refused_by_name(
    fields: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read_grammar(take_formats(fields))
    assert words in str(caught.value)
    assert caught.value.param == (param or "guided_whitespace_pattern")


TAG = {
    "triggers": ["<f"],
    "structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}],
}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_object", "schema": OBJECT}},
            "response_format.schema",
            "the type json_schema",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
            "the type json_schema",
        ),
        ({"response_format": {"type": "text", "typ": 1}}, "response_format.typ", "mean type?"),
        (_format(stict=True), "response_format.json_schema.stict", "mean strict?"),
        (
            {"response_format": _format()["response_format"] | {"strict": True}},
            "response_format.strict",
            "unknown field",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "tag"}}},
            "response_format.format",
            "not supported",
        ),
        (
            {"structured_outputs": {"structural_tag": TAG | {"trigger": "<f"}}},
            "structured_outputs.structural_tag.trigger",
            "mean triggers?",
        ),
        (
            {"response_format": TAG | {"type": "structural_tag", "structures": [{"bgin": "<f"}]}},
            "response_format.structures[0].bgin",
            "mean begin?",
        ),
        (
            {"structured_outputs": {"structural_tag": TAG | {"type": "tag"}}},
            "structured_outputs.structural_tag.type",
            "structural_tag",
        ),
        (
            {"structured_outputs": {"structural_tag": "{"}},
            "structured_outputs.structural_tag",
            "is not JSON",
        ),
    ],
)
def test_part_without_effect_is_refused_by_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read_grammar(take_formats(fields))
    assert (caught.value.param, caught.value.mapping.status) == (param, 400)
    assert words in str(caught.value)


def test_part_that_is_null_is_left_out() -> None:
    named = _format(description="d", strict=None)["response_format"] | {"schema": None}
    assert _source({"response_format": named}).kind is GrammarKind.JSON_SCHEMA


@pytest.mark.parametrize("tag", [TAG, TAG | {"type": "structural_tag"}, json.dumps(TAG)])
def test_structural_tag_is_an_object_or_its_text(tag: object) -> None:
    source = _source({"structured_outputs": {"structural_tag": tag}})
    assert json.loads(source.text) == [["<f", "<f=a>", '{"type": "object"}', "</f>"]]


def test_structural_tag_keeps_the_names_of_tokens() -> None:
    """They are looked for in its text, also those that are not ASCII, as DeepSeek's."""
    begin = "<｜tool▁calls▁begin｜>"
    tag = {"structures": [{"begin": begin, "schema": OBJECT}], "triggers": [begin]}
    text = _source({"response_format": {"type": "structural_tag", **tag}}).text
    assert TokenTable(pack_table([begin], {0: True}), None).tokens_within(text) == {begin: 0}


def test_unknown_keyword_without_strict_is_an_annotation() -> None:
    assert "foo" in _source(_format(strict=False, schema={"foo": 1})).text
