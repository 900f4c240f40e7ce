"""The grammar process: translation, refusals in one sentence, and hostile sources within its budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.grammar.check_process import GrammarProcess, GrammarRefused
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarPart, GrammarSource
from modelswarm_gateway.generation.grammar.translation import _byte_tokenizer

EOS = 256


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    process = GrammarProcess()
    yield process
    process.close()


def _accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(_byte_tokenizer(()), grammar, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


async def _compile(process: GrammarProcess, kind: GrammarKind, source: object, **more: Any) -> str:
    text = source if isinstance(source, str) else json.dumps(source)
    return await process.compile(GrammarSource(kind, text, "field", **more))


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        (GrammarKind.JSON_SCHEMA, {"type": "object"}, '{"a":1}', "[]"),
        (GrammarKind.JSON_SCHEMA, {"enum": ["é", 3]}, '"é"', '"e"'),
        (GrammarKind.REGEX, "[0-9]{2}/x", "12/x", "1/x"),
        (GrammarKind.CHOICE, ["ja", 'n"ein\n'], 'n"ein\n', "nein"),
        (GrammarKind.CHOICE, ["a\x7f", ""], "a\x7f", "a"),
        (GrammarKind.CHOICE, [f"{place:05}" for place in range(10_000)], "09999", "10000"),
        (GrammarKind.GRAMMAR, 'start: "a" | "b"', "b", "c"),
        (GrammarKind.GRAMMAR, 'root ::= "a" | "b"', "a", "c"),
        (
            GrammarKind.STRUCTURAL_TAG,
            [["<f", "<f=x>", '{"type": "integer"}', "</f>"]],
            "text <f=x>12</f> more",
            "text <f=x>a</f>",
        ),
    ],
)
async def test_source_becomes_grammar_of_its_texts(
    process: GrammarProcess, kind: GrammarKind, source: object, good: str, bad: str
) -> None:
    grammar = await _compile(process, kind, source)
    assert _accepts(grammar, good)
    assert not _accepts(grammar, bad)


async def test_whitespace_is_none_unless_asked_for(process: GrammarProcess) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    spaced = "[1, 2]"
    assert not _accepts(await _compile(process, GrammarKind.JSON_SCHEMA, schema), spaced)
    for whitespace in (None, "[ ]?"):
        grammar = await _compile(process, GrammarKind.JSON_SCHEMA, schema, whitespace=whitespace)
        assert _accepts(grammar, spaced)


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        (GrammarKind.JSON_SCHEMA, {"type": "strnig"}, "Invalid type: strnig"),
        (GrammarKind.JSON_SCHEMA, {"uniqueItems": True}, "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, {"format": "nonsense", "type": "string"}, "format"),
        (GrammarKind.JSON_SCHEMA, {"minimum": 5, "maximum": 3, "type": "integer"}, "minimum"),
        (GrammarKind.JSON_SCHEMA, {"minimum": 10**400}, "number out of range"),
        (GrammarKind.JSON_SCHEMA, {"$ref": "#/$defs/no"}, "does not exist"),
        (GrammarKind.JSON_SCHEMA, {"$ref": "http://x/y"}, "http://x/y"),
        (GrammarKind.JSON_SCHEMA, {"$ref": "#"}, "no text fits"),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.CHOICE, ["\ud83d"], "surrogate"),
        (GrammarKind.GRAMMAR, "start: foo", "unknown name"),
        (GrammarKind.GRAMMAR, "start: " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply nested"),
    ],
)
async def test_wrong_source_is_refused_in_one_sentence(
    process: GrammarProcess, kind: GrammarKind, source: object, words: str
) -> None:
    with pytest.raises(GrammarRefused) as caught:
        await _compile(process, kind, source)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_grammar_may_name_the_models_special_tokens(process: GrammarProcess) -> None:
    source = GrammarSource(GrammarKind.GRAMMAR, 'start: <|tool|> "a"', "field")
    assert "<|tool|>" in await process.compile(replace(source, tokens=(("<|tool|>", 7),)))
    with pytest.raises(GrammarRefused, match="unknown special token"):
        await process.compile(source)


async def test_tokens_may_be_triggers_of_structural_tags(process: GrammarProcess) -> None:
    """Text spells no token, and a token is no text: the trigger is the token."""
    tag = ["<f", "<f>{", '{"type": "integer"}', "}</f>"]
    text = json.dumps([tag, ["[X]", "[X]", '{"type": "null"}', ""]])
    source = GrammarSource(GrammarKind.STRUCTURAL_TAG, text, "field", tokens=(("[X]", 9),))
    grammar = (await process.check(source, [EOS])).text
    assert "<[9]>" in grammar
    grammar = grammar.replace("<[9]>", "<|x|>")
    matcher = LLMatcher(_byte_tokenizer(("<|x|>",)), grammar, log_level=0)
    for good, bad in ((b"a <f>{12", b"x"), ([EOS + 1, *b"null and"], b"[X]")):
        assert matcher.consume_tokens(list(good))
        assert matcher.try_consume_tokens(list(bad)) < len(bad)
        matcher.reset()


async def test_source_beyond_the_budget_is_refused() -> None:
    """The budget is so small that any child exceeds it; the next request gets a new child."""
    process = GrammarProcess(cpu_seconds=1e-6)
    try:
        wide = {"anyOf": [{"required": [f"a{n}"], "type": "object"} for n in range(5000)]}
        for _ in range(2):
            with pytest.raises(GrammarRefused, match="takes more than"):
                await _compile(process, GrammarKind.JSON_SCHEMA, wide)
    finally:
        process.close()


async def test_part_that_cannot_be_used_is_named(process: GrammarProcess) -> None:
    """Also a part that the whole would show only in the middle of an answer; special tokens get their ids."""
    good = GrammarPart("a", '{"type": "object"}')
    bad = GrammarPart("b", '{"type": "object", "properties": {"n": false}, "required": ["n"]}')
    text = 'start: <|marker_0|> "x"'
    tokens = (("[X]", 77),)
    source = GrammarSource(GrammarKind.ANSWER, text, "tools", parts=(good,), tokens=tokens)
    assert "<[77]>" in (await process.check(source, [1])).text
    with pytest.raises(ApiError) as caught:
        await process.check(replace(source, parts=(good, bad)), [1])
    assert caught.value.param == "b"


async def test_grammar_that_no_link_carries_is_refused(process: GrammarProcess) -> None:
    """A server ends the link over which it gets a larger one, and with it all sessions there are moved."""
    choices = json.dumps([f"{'<' * 25}{place}" for place in range(9000)])
    with pytest.raises(ApiError, match="bytes; allowed: 1048576") as caught:
        await process.check(GrammarSource(GrammarKind.CHOICE, choices, "guided_choice"), [EOS])
    assert (caught.value.param, caught.value.mapping.status) == ("guided_choice", 400)
