"""Translates a grammar source to llguidance's own grammar text and checks it, within llguidance's limits.

Runs in the grammar process (`check_worker.py`) only: hostile sources cost time and memory here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from modelswarm_gateway.generation.grammar.lark import LarkRules, json_options, placeholders, quote
from modelswarm_gateway.generation.grammar.source import GrammarKind
from modelswarm_gateway.generation.grammar.structural_tags import write_structural_tags

MAX_REASON_CHARACTERS = 400
_EOS = 256  # after the bytes
_FORCED_PARTS = 8  # forced texts that the check follows
_WORDS = {"NoExtensionBias": "no text fits it", "NoExtension": "no text fits it"}
_SPECIAL_MARK = b"\xff"  # llguidance's mark of special tokens


class GrammarError(ValueError):
    """The source is refused; the text says why."""


class _ByteTokens:
    """A tokenizer with one token per byte: it shows whether any text fits a grammar."""

    def __init__(self, special: Sequence[str]) -> None:
        names = ["<|end|>", *(name for name in special if name != "<|end|>")]
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [_SPECIAL_MARK + name.encode() for name in names]
        self.special_token_ids = list(range(_EOS, len(self.tokens)))
        self.eos_token_id = _EOS
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=16)
def _byte_tokenizer(special: tuple[str, ...]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteTokens(special)), eos_token=[_EOS])


def compile_source(
    kind: GrammarKind, text: str, whitespace: str | None, markers: Sequence[str] = ()
) -> str:
    """Return llguidance's grammar of the source. Raise GrammarError if no text, or too complex a set of texts, fits.

    `markers`: special tokens of the model, sorted. A client's grammar names them; others have placeholders.
    """
    grammar = _translate(kind, text, whitespace, markers)
    special = markers if kind is GrammarKind.GRAMMAR else placeholders(len(markers))
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error and "unknown special token" not in messages[0]:
        raise GrammarError(one_sentence(messages[0]))
    _check_begin(LLMatcher(_byte_tokenizer(tuple(special)), grammar, log_level=0))
    return grammar


def _check_begin(matcher: LLMatcher) -> None:
    """Raise GrammarError if no text fits the grammar, or its first free choice is too complex."""
    for _ in range(_FORCED_PARTS):
        matcher.compute_bitmask()
        forced = matcher.compute_ff_tokens()
        if not forced or not matcher.consume_tokens(forced):
            break
    if matcher.is_error():
        reason = one_sentence(matcher.get_error())
        raise GrammarError(_WORDS.get(reason, reason))


def _translate(kind: GrammarKind, text: str, whitespace: str | None, markers: Sequence[str]) -> str:
    match kind:
        case GrammarKind.JSON_SCHEMA:
            options: Any = json_options(whitespace)
            return LLMatcher.grammar_from_json_schema(text, overrides=options)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case GrammarKind.CHOICE:
            # A terminal: of a rule's alternatives at most 2,000 can be in progress at once.
            choices = " | ".join(quote(each) or '""' for each in json.loads(text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case GrammarKind.GRAMMAR:
            try:
                return grammar_from("grammar", text)
            except ValueError as error:
                raise GrammarError(one_sentence(str(error))) from error
        case GrammarKind.ANSWER:
            return LLMatcher.grammar_from_lark(text)
        case GrammarKind.STRUCTURAL_TAG:
            tags = write_structural_tags(LarkRules(markers), text, whitespace)
            return LLMatcher.grammar_from_lark(tags)


def one_sentence(message: str) -> str:
    """Return llguidance's message without its parser's state and its drawings of the source."""
    words: list[str] = []
    for line in message.split("\n<state>")[0].splitlines():
        bare = line.strip()
        if bare.startswith("^") or bare.split("|")[0].strip().isdecimal():
            continue
        words.append(bare)
    return " ".join(words)[:MAX_REASON_CHARACTERS]
