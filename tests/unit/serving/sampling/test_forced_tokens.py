"""Forced tokens of a grammar: found together or one by one they are the same, from any log that a recovery leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from modelswarm.protocol.messages import MAX_FORCED_TOKENS, Grammar, Sampling
from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.grammar.masking import apply_masks
from modelswarm_serving.model.grammar.matchers import VERSION, GrammarMatchers
from modelswarm_serving.model.sampling.sampler import sample

EOS, VOCAB = 0, 320
PROMPT = [5, 6, 7]
CITY = {
    "type": "object",
    "properties": {
        "city_name": {"type": "string", "maxLength": 6},
        "number_of_inhabitants": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["capital city", "capital of a county", "other"]},
        "continent": {"const": "somewhere far away"},
    },
    "required": ["city_name", "number_of_inhabitants", "kind", "continent"],
    "additionalProperties": False,
}
SEEDS = (1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with merges of the schema's words, so that most texts have several spellings."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [json.dumps(CITY), json.dumps(CITY, separators=(",", ":"))] * 20
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    text = LLMatcher.grammar_from_json_schema(
        json.dumps(CITY), overrides={"whitespace_flexible": False}
    )
    return Grammar(text, VERSION)


def request(
    grammar: Grammar, generated: Sequence[int], max_forced: int, **fields: Any
) -> SampleRequest:
    log = [*PROMPT, *generated]
    sampling = Sampling(temperature=1.0, seed=7, eos=(EOS,), grammar=grammar, **fields)
    return SampleRequest(sampling, len(log), log, len(PROMPT), 1, max_forced=max_forced)


def step(matchers: GrammarMatchers, wanted: SampleRequest, seed: int) -> tuple[int, ...]:
    """Return the sampled token of a random model and those forced after it. Logits depend on the position only."""
    torch.manual_seed(1000 * seed + wanted.position)
    logits = torch.randn(1, VOCAB) * 3
    found = sample(logits, [replace(wanted, mask=matchers.mask(wanted))])[0]
    assert isinstance(found, SampledToken)
    return (found.token, *matchers.forced_after(wanted, found.token))


def generate(
    matchers: GrammarMatchers,
    grammar: Grammar,
    seed: int,
    max_forced: int = MAX_FORCED_TOKENS,
    begun: Sequence[int] = (),
    **fields: Any,
) -> list[list[int]]:
    """Return the groups of an answer that continues `begun`."""
    tokens, groups = [*begun], list[list[int]]()
    while EOS not in tokens:
        assert len(tokens) < 300
        made = step(matchers, request(grammar, tokens, max_forced, **fields), seed)
        groups.append([*made])
        tokens += made
    return groups


def flat(groups: Sequence[Sequence[int]]) -> list[int]:
    return [token for group in groups for token in group]


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_of_any_size_are_the_same_answer(file: Path, grammar: Grammar, seed: int) -> None:
    one_by_one = generate(GrammarMatchers(file, VOCAB), grammar, seed, 0)
    assert {len(group) for group in one_by_one} == {1}
    for most in (1, 5, MAX_FORCED_TOKENS):
        groups = generate(GrammarMatchers(file, VOCAB), grammar, seed, most)
        assert flat(groups) == flat(one_by_one)
        assert max(len(group) for group in groups) <= 1 + most
    assert 2 * len(groups) < len(one_by_one)


@pytest.mark.parametrize("seed", SEEDS)
def test_answer_is_valid_and_its_forced_text_canonical(
    file: Path, grammar: Grammar, seed: int
) -> None:
    groups = generate(GrammarMatchers(file, VOCAB), grammar, seed)
    tokenizer = Tokenizer.from_file(str(file))
    jsonschema.validate(json.loads(tokenizer.decode(flat(groups))), CITY)
    longest = max(groups, key=len)[1:]  # without the sampled token
    assert len(longest) > 4
    text = tokenizer.decode(longest)
    assert tokenizer.encode(text, add_special_tokens=False).ids == longest


@pytest.mark.parametrize("seed", SEEDS)
def test_any_cut_of_the_log_continues_with_the_same_tokens(
    file: Path, grammar: Grammar, seed: int
) -> None:
    """Also from the middle of a group, by the matcher that went on and by one of another server."""
    used = GrammarMatchers(file, VOCAB)
    tokens = flat(generate(used, grammar, seed))
    for cut in range(len(tokens) - 1):
        for matchers in (used, GrammarMatchers(file, VOCAB)):
            rest = generate(matchers, grammar, seed, begun=tokens[:cut])
            assert flat(rest) == tokens[cut:], cut


@pytest.mark.parametrize(
    "rules", [{"bad_words": ((3, 4),)}, {"no_repeat_ngram_size": 40}], ids=["words", "n-grams"]
)
def test_rules_that_may_ban_tokens_leave_them_to_the_model(
    file: Path, grammar: Grammar, rules: dict[str, Any]
) -> None:
    groups = generate(GrammarMatchers(file, VOCAB), grammar, 1, **rules)
    assert {len(group) for group in groups} == {1}


def test_end_of_the_sequence_is_never_forced(file: Path) -> None:
    matchers = GrammarMatchers(file, VOCAB)
    grammar = Grammar(LLMatcher.grammar_from_lark('start: "one text only"'), VERSION)
    groups = generate(matchers, grammar, 1)
    assert groups[-1] == [EOS]
    first = request(grammar, (), 0)
    scores = apply_masks(torch.zeros(1, VOCAB), [replace(first, mask=matchers.mask(first))])
    assert torch.isfinite(scores[0]).nonzero()[:, 0].tolist() == [groups[0][0]]
