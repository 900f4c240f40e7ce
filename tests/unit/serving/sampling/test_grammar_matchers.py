"""Grammar matchers of a tail: masks, replay, ends, faults; judged by llguidance itself and by jsonschema."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from support.models.tiny_models import EOS, VOCAB, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from modelswarm.protocol.messages import Grammar, Sampling
from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.grammar.masking import apply_masks
from modelswarm_serving.model.grammar.matchers import (
    MAX_COMPILED,
    MAX_UNUSED,
    VERSION,
    GrammarFault,
    GrammarMatchers,
)
from modelswarm_serving.model.sampling.sampler import sample

PROMPT = [5, 6, 7]
WORD = {"type": "string", "maxLength": 12}
PERSON = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "enum": {"enum": ["red", "grün", 3, None, 'q"\\']},
    "const": {"const": {"a": [1, "é😀"]}},
    "array": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
    "any of": {"anyOf": [PERSON, {"type": "boolean"}, {"type": "null"}]},
    "ref": TREE,
    "range": {"type": "number", "minimum": -2.5, "maximum": 10},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$", "maxLength": 12},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "integer"}], "items": False},
}


def _schema(schema: Any) -> Grammar:
    text = LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )
    return Grammar(text, VERSION)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB)
    return folder / "tokenizer.json"


@pytest.fixture
def matchers(tokenizer_file: Path) -> GrammarMatchers:
    return GrammarMatchers(tokenizer_file, VOCAB)


def _pick(grammar: Grammar, generated: Sequence[int], **changes: Any) -> SampleRequest:
    log = [*PROMPT, *generated]
    fields: dict[str, Any] = {"temperature": 1.0, "eos": (EOS,), "seed": 7} | changes
    sampling = Sampling(grammar=grammar, **fields)
    return SampleRequest(sampling, len(log), log, len(PROMPT), session=1)


def _masked(matchers: GrammarMatchers, pick: SampleRequest) -> SampleRequest:
    return SampleRequest(
        pick.sampling, pick.position, pick.log, pick.begin, pick.session, matchers.mask(pick)
    )


def _allowed(matchers: GrammarMatchers, pick: SampleRequest) -> list[int]:
    scores = apply_masks(torch.zeros(1, VOCAB), [_masked(matchers, pick)])
    return torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


def _generate(matchers: GrammarMatchers, grammar: Grammar, seed: int, most: int = 400) -> list[int]:
    """Return the tokens that a random model samples at temperature 1, with eos if it came."""
    torch.manual_seed(seed)
    tokens: list[int] = []
    while len(tokens) < most and EOS not in tokens:
        pick = _masked(matchers, _pick(grammar, tokens, seed=seed))
        found = sample(torch.randn(1, VOCAB) * 3, [pick])[0]
        assert isinstance(found, SampledToken)
        tokens.append(found.token)
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
def test_output_of_random_models_is_valid(
    matchers: GrammarMatchers, tokenizer_file: Path, name: str
) -> None:
    text_of = LLTokenizer(tokenizer_file.read_text(), n_vocab=VOCAB).decode_bytes
    for seed in range(3):
        tokens = _generate(matchers, _schema(SCHEMAS[name]), seed)
        assert tokens[-1] == EOS
        made = json.loads(text_of(tokens[:-1]))
        jsonschema.validate(made, SCHEMAS[name], format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", ["object", "ref"])
def test_masks_equal_a_replayed_matcher_at_each_step(
    matchers: GrammarMatchers, tokenizer_file: Path, name: str
) -> None:
    """Also llguidance's own mask of the same tokens, which has its end token where the grammar is complete.

    Where it forces tokens, only the first of them is allowed.
    """
    grammar = _schema(SCHEMAS[name])
    tokens = _generate(matchers, grammar, 3)[:-1]
    reference = LLMatcher(LLTokenizer(tokenizer_file.read_text(), n_vocab=VOCAB), grammar.text)
    kept = GrammarMatchers(tokenizer_file, VOCAB)
    for end in range(len(tokens) + 1):
        if end:
            assert reference.consume_token(tokens[end - 1])
        bits = reference.compute_bitmask()
        wanted = [token for token in range(VOCAB) if bits[token >> 3] >> (token & 7) & 1]
        forced = reference.compute_ff_tokens()
        assert set(forced[:1]) <= set(wanted)
        wanted = wanted if EOS in wanted else forced[:1] or wanted
        pick = _pick(grammar, tokens[:end])
        assert _allowed(kept, pick) == wanted
        assert _allowed(GrammarMatchers(tokenizer_file, VOCAB), pick) == wanted


def _write_special_behind_the_logits(folder: Path) -> tuple[GrammarMatchers, Tokenizer]:
    """Return matchers of logits that have no place for the tokenizer's `<image>`."""
    write_tokenizer(folder, VOCAB)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    width = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(file))
    return GrammarMatchers(file, width), tokenizer


def _mask_tokens(matchers: GrammarMatchers, pick: SampleRequest) -> list[int]:
    bits = np.frombuffer(matchers.mask(pick), np.uint8)
    return [int(token) for token in np.flatnonzero(np.unpackbits(bits, bitorder="little"))]


def test_special_token_behind_the_logits_is_never_allowed(tmp_path: Path) -> None:
    matchers, tokenizer = _write_special_behind_the_logits(tmp_path)
    width = tokenizer.get_vocab_size() - 1
    assert matchers.start() == ""
    pick = _pick(_schema(PERSON), [])
    assert len(matchers.mask(pick)) == (width + 31) // 32 * 4
    assert 0 < max(_mask_tokens(matchers, pick)) < width


@pytest.mark.parametrize(
    ("end", "allowed"), [('<image> "b"', ""), ("<image>", ""), ('("b" | <image>)', "b")]
)
def test_special_token_behind_the_logits_is_not_forced(
    tmp_path: Path, end: str, allowed: str
) -> None:
    """The embedding has no row for it: the step that reads it fails, with all sessions."""
    matchers, tokenizer = _write_special_behind_the_logits(tmp_path)
    [first] = tokenizer.encode("a", add_special_tokens=False).ids
    grammar = Grammar(LLMatcher.grammar_from_lark(f'start: "a" {end}'), VERSION)
    pick = replace(_pick(grammar, []), max_forced=8)
    assert _mask_tokens(matchers, pick) == [first]
    assert matchers.forced_after(pick, first) == ()
    if allowed:
        ids = tokenizer.encode(allowed, add_special_tokens=False).ids
        assert _mask_tokens(matchers, _pick(grammar, [first])) == ids
        return
    with pytest.raises(GrammarFault, match="no token may follow"):
        matchers.mask(_pick(grammar, [first]))


def test_rewound_log_gives_the_mask_of_its_tokens(matchers: GrammarMatchers) -> None:
    grammar = _schema(PERSON)
    tokens = _generate(matchers, grammar, 1)[:-1]
    early = _allowed(matchers, _pick(grammar, tokens[:9]))
    _allowed(matchers, _pick(grammar, tokens))
    assert _allowed(matchers, _pick(grammar, tokens[:9])) == early


def test_lexer_that_other_sessions_filled_is_replaced(matchers: GrammarMatchers) -> None:
    """A text of 19,000 characters takes as many of 50,000 states, and each session writes another field."""
    limits = {f"f{place}": {"type": "string", "maxLength": 20_000 + place} for place in range(4)}
    grammar = _schema({"type": "object", "properties": limits})
    letter = matchers.load().tokenize_str("a")
    for place, field in enumerate(limits):
        begin = matchers.load().greedy_tokenize(f'{{"{field}":"')
        pick = replace(_pick(grammar, begin + letter * 19_000), session=place)
        assert letter[0] in _allowed(matchers, pick)
    for place, field in enumerate(limits):  # the others go on
        begin = matchers.load().greedy_tokenize(f'{{"{field}":"')
        pick = replace(_pick(grammar, begin + letter * 19_001), session=place)
        assert letter[0] in _allowed(matchers, pick)


def test_matchers_of_ended_sessions_are_dropped(matchers: GrammarMatchers) -> None:
    """Each session has a grammar of its own, whose lexer grows with its answer: those of ended ones are not kept."""
    for place in range(40):
        grammar = Grammar(LLMatcher.grammar_from_regex(f"x{place}[ab]*c"), VERSION)
        assert matchers.prepare(grammar) is None
        begin = matchers.load().greedy_tokenize(f"x{place}")
        for _ in range(10):
            assert _allowed(matchers, replace(_pick(grammar, begin), session=place))
            begin += matchers.load().tokenize_str("a")
    assert len(matchers._sessions) <= 4
    assert len(matchers._compiled) <= MAX_UNUSED + 4


def test_matchers_of_sessions_in_turn_are_kept(matchers: GrammarMatchers) -> None:
    """A matcher that were built anew at each step would cost each of its sessions a replay."""
    count = MAX_COMPILED + 6
    grammars = [Grammar(LLMatcher.grammar_from_regex(f"x{n}[ab]*c"), VERSION) for n in range(count)]
    texts = [matchers.load().greedy_tokenize(f"x{place}") for place in range(count)]
    found: list[list[int]] = []
    for _ in range(3):
        for place, grammar in enumerate(grammars):
            assert _allowed(matchers, replace(_pick(grammar, texts[place]), session=place))
            texts[place] += matchers.load().tokenize_str("a")
        found.append([id(matchers._sessions[place].matcher) for place in range(count)])
    assert found[0] == found[1] == found[2]


def test_end_tokens_follow_complete_text_only(matchers: GrammarMatchers) -> None:
    """All end tokens of the request count, and none that is not its own."""
    grammar = Grammar('start: "ab"', VERSION)
    a, b = matchers.load().tokenize_str("ab")
    stop = 99
    assert _allowed(matchers, _pick(grammar, [], eos=(EOS, stop))) == [a]
    assert _allowed(matchers, _pick(grammar, [a, b], eos=(EOS, stop))) == [EOS, stop]
    assert _allowed(matchers, _pick(grammar, [a, b], eos=(stop,))) == [stop]
    with pytest.raises(GrammarFault, match="no token may follow"):
        matchers.mask(_pick(grammar, [a, b], eos=()))


def test_token_that_does_not_fit_ends_the_session(matchers: GrammarMatchers) -> None:
    other = Grammar('start: "ab"', "llguidance 0.1")
    a, b = matchers.load().tokenize_str("ab")
    with pytest.raises(GrammarFault, match=r"position 4.*|llguidance 0\.1 had checked it"):
        matchers.mask(_pick(other, [a, a, b]))
    assert _allowed(matchers, _pick(other, [a])) == [b]


def test_grammar_that_cannot_be_compiled_is_named(matchers: GrammarMatchers) -> None:
    fault = matchers.prepare(Grammar("start: foo", VERSION))
    assert fault is not None
    assert "unknown name" in fault
    assert "\n" not in fault
    assert matchers.prepare(_schema(PERSON)) is None


def test_rows_without_grammar_are_sampled_as_without_neighbours(
    matchers: GrammarMatchers,
) -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, VOCAB)
    free = SampleRequest(Sampling(temperature=1.0, seed=3), 3, PROMPT, 3)
    bound = _masked(matchers, _pick(_schema(PERSON), []))
    mixed = sample(logits, [free, bound, free, bound])
    assert mixed[0] == sample(logits[:1], [free])[0]
    assert mixed[2] == sample(logits[2:3], [free])[0]
    assert mixed[1] == sample(logits[1:2], [bound])[0]
    assert isinstance(mixed[1], SampledToken)
    brace = matchers.load().tokenize_str("{")[0]
    assert mixed[1].token == brace
    raw = torch.log_softmax(logits[1], -1)[brace].item()
    assert mixed[1].logprob == pytest.approx(raw)


def test_forced_and_free_rows_share_a_step(tokenizer_file: Path) -> None:
    """llguidance's mask has one word more than the tokens need, if 32 divides their number, as in most models."""
    texts = ('start: "ab"', LLMatcher.grammar_from_regex("[ab]c"))
    for vocab in (VOCAB, VOCAB + 1):
        matchers = GrammarMatchers(tokenizer_file, vocab)
        a, b = matchers.load().tokenize_str("ab")
        picks = [_masked(matchers, _pick(Grammar(text, VERSION), [])) for text in texts]
        scores = apply_masks(torch.zeros(2, vocab), picks)
        assert torch.isfinite(scores).nonzero().tolist() == [[0, a], [1, a], [1, b]]


def test_batch_of_grammars_keeps_them_apart(matchers: GrammarMatchers) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choice("abc") for _ in range(6)) for _ in range(5)]
    for end in range(6):
        for place, word in enumerate(words):
            tokens = matchers.load().tokenize_str(word)
            pick = _pick(Grammar(f'start: "{word}"', VERSION), tokens[:end])
            pick = SampleRequest(pick.sampling, pick.position, pick.log, pick.begin, place)
            assert _allowed(matchers, pick) == [tokens[end]]


def test_tokenizer_that_the_library_cannot_use_is_reported(tmp_path: Path) -> None:
    """A table of words has no bytes; a server with it says so at its start, and to sessions that come all the same."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    for name in ("tokenizer.json", "missing.json"):
        matchers = GrammarMatchers(tmp_path / name, 2)
        assert VERSION in matchers.start()
        assert matchers.prepare(Grammar(LLMatcher.grammar_from_regex("a"), VERSION))


def test_text_with_the_name_of_a_special_token_is_spelled(tmp_path: Path) -> None:
    """The model's tokenizer would write it as that token, which no text of a grammar matches."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<t>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    matchers = GrammarMatchers(tmp_path / "tokenizer.json", 258)
    grammar = Grammar(LLMatcher.grammar_from_lark('start: "a<t>b"'), VERSION)
    for extra in (Sampling(), Sampling(bad_words=((1, 2),))):
        sampling = replace(extra, eos=(256,), grammar=grammar)
        log = list(PROMPT)
        for _ in "a<t>b":
            pick = SampleRequest(sampling, len(log), log, len(PROMPT), session=len(extra.bad_words))
            bits = np.unpackbits(np.frombuffer(matchers.mask(pick), np.uint8), bitorder="little")
            log.append(int(np.flatnonzero(bits)[0]))
        assert made.decode(log[len(PROMPT) :]) == "a<t>b"


def test_token_0_may_be_a_text(tmp_path: Path) -> None:
    """llguidance takes it for the end where no token has the name of one, as in MiniMax's models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("[stop]", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 256}')
    matchers = GrammarMatchers(tmp_path / "tokenizer.json", VOCAB)
    assert made.encode("!").ids == [0]
    grammar = Grammar(LLMatcher.grammar_from_lark('start: "!!"'), VERSION)
    for tokens, following in (([], [0]), ([0], [0]), ([0, 0], [256])):
        assert _allowed(matchers, _pick(grammar, tokens, eos=(256,))) == following


class _LongText:
    """A matcher of which only the bytes of the forced text may be asked for."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.compute_ff_bytes = matcher.compute_ff_bytes
        self.validate_tokens = matcher.validate_tokens

    def compute_ff_tokens(self) -> list[int]:
        raise AssertionError("all of the text is tokenized at each token")


def test_forced_text_is_not_tokenized_as_a_whole(matchers: GrammarMatchers) -> None:
    """A choice of one text may have 256 KB: its tokens would take the other sessions of the tail a second each."""
    text = "é 12, " * 4000
    grammar = Grammar(LLMatcher.grammar_from_lark(f'start: C\nC: "{text}"'), VERSION)
    tokens = matchers.load().tokenize_str(text)
    for end in (0, 1, 2, 3, 4000):
        pick = _pick(grammar, tokens[:end])
        assert _allowed(matchers, pick) == [tokens[end]]
        asked: Any = _LongText(matchers._sessions[pick.session].matcher)
        assert matchers._forced_token(asked, pick.sampling) == tokens[end]
