"""Fields that name tokens: ids of the model only, bad words as vLLM encodes them, and the model's own defaults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.models.tokenizers import END, encode_bytes, make_tokenizer
from transformers import NoBadWordsLogitsProcessor

from modelswarm.protocol.messages import Sampling
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.models.sampling_defaults import SamplingOptions, read_defaults
from modelswarm_gateway.models.sampling_tokens import add_bad_words

TEXT = make_tokenizer()


def complete(**options: Any) -> Sampling:
    asked = SamplingOptions(**options)
    return asyncio.run(add_bad_words(TEXT.defaults.sampling(asked, 1), asked, TEXT))


@pytest.mark.parametrize(
    "field", ["logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words_ids"]
)
def test_id_outside_the_vocabulary_is_refused_by_name(field: str) -> None:
    for token in (-1, TEXT.vocabulary):
        value: Any = ((token, 1.0),) if field == "logit_bias" else (token,)
        value = ((1, token),) if field == "bad_words_ids" else value
        with pytest.raises(ApiError, match=f"{token} is no token") as refusal:
            complete(**{field: value})
        assert (refusal.value.param, refusal.value.mapping.status) == (field, 400)


def test_bad_word_that_is_too_long_is_refused_by_place() -> None:
    with pytest.raises(ApiError, match="must be 1 to 64 tokens") as refusal:
        complete(bad_words=("a", "ab" * 99))
    assert refusal.value.param == "bad_words[1]"


def test_sequences_of_ids_are_taken_as_transformers_takes_them() -> None:
    """One end token alone stays possible; a sequence that holds one does not."""
    (end,) = TEXT.defaults.eos
    given = ((5, 6), (end,), (7,), (end, 8), (5, 6))
    found = complete(bad_words_ids=given).bad_words
    assert found == ((5, 6), (7,), (end, 8))
    processor = NoBadWordsLogitsProcessor([list(word) for word in given], eos_token_id=end)
    assert set(processor.sequence_bias) == set(found)


def test_more_sequences_than_servers_take_are_refused() -> None:
    words = tuple((a, b) for a in range(32) for b in range(32, 65))
    with pytest.raises(ApiError, match="1056 sequences") as refusal:
        complete(bad_words_ids=words)
    assert refusal.value.param == "bad_words_ids"


def test_bad_words_become_sequences_of_tokens() -> None:
    plain = tuple(asyncio.run(TEXT.encode("ab", special=False)))
    assert plain in complete(bad_words=("ab",)).bad_words


def test_options_reach_the_sampling_parameters() -> None:
    last = TEXT.vocabulary - 1
    found = complete(
        typical_p=0.5, presence_penalty=-1.0, frequency_penalty=0.5, no_repeat_ngram_size=3,
        min_tokens=4, logit_bias=((last, -100.0),), stop_token_ids=(last, END), allowed_token_ids=(1, 1, 2),
    )  # fmt: skip
    assert (found.typical_p, found.presence_penalty, found.frequency_penalty) == (0.5, -1.0, 0.5)
    assert (found.no_repeat_ngram_size, found.min_tokens) == (3, 4)
    assert found.logit_bias == ((last, -100.0),)
    assert found.eos == (END, last)
    assert found.allowed_tokens == (1, 2)
    assert complete(stop_token_ids=(last,), ignore_eos=True).eos == (last,)


def test_generation_config_is_obeyed_or_named() -> None:
    config = {
        "do_sample": True, "typical_p": 0.8, "no_repeat_ngram_size": 2, "min_new_tokens": 3,
        "bad_words_ids": [[5, 6], [2], [7]], "suppress_tokens": [2, 9], "eos_token_id": 2,
        "forced_eos_token_id": 2, "begin_suppress_tokens": [4], "num_beams": 4, "guidance_scale": 1.0,
    }  # fmt: skip
    defaults = read_defaults(config, {}, None)
    found = defaults.sampling(SamplingOptions(), 1)
    assert (found.typical_p, found.no_repeat_ngram_size, found.min_tokens) == (0.8, 2, 3)
    assert found.bad_words == ((5, 6), (7,), (2,), (9,))
    assert set(defaults.ignored) == {"forced_eos_token_id", "begin_suppress_tokens", "num_beams"}
    assert defaults.sampling(SamplingOptions(min_tokens=0, typical_p=1.0), 1).min_tokens == 0


def test_more_bad_words_than_fit_are_named_and_not_cut() -> None:
    defaults = read_defaults({"suppress_tokens": list(range(600))}, {}, None)
    assert (defaults.bad_words, defaults.ignored) == ((), ("bad_words_ids", "suppress_tokens"))


def test_bad_word_that_cannot_be_encoded_is_refused_by_name() -> None:
    text = make_tokenizer(config={"vocab_size": encode_bytes("z")[0]})
    for word, detail in (("az", "no embedding for its token z"), ("a" * (3 << 20), "too long")):
        asked = SamplingOptions(bad_words=("a", word))
        with pytest.raises(ApiError, match=rf"bad_words\[1\]: the .*{detail}"):
            asyncio.run(add_bad_words(text.defaults.sampling(asked, 1), asked, text))
    text.close()
    asked = SamplingOptions(bad_words=("b",))
    with pytest.raises(ApiError) as caught:
        asyncio.run(add_bad_words(text.defaults.sampling(asked, 1), asked, text))
    assert caught.value.mapping.status == 503
