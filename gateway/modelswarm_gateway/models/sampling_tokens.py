"""Sampling fields that name tokens: their ids checked against the model's vocabulary, bad words encoded.

Used by the service, once per request. Knows no API: the errors name the fields that both have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from modelswarm_gateway.errors import invalid_field, invalid_request
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.models.tokenizer import ModelTokenizer, TextTooLong, as_api_errors


async def add_bad_words(
    sampling: Sampling, options: SamplingOptions, text: ModelTokenizer
) -> Sampling:
    """Return `sampling` with the request's bad words. Raise ApiError for them, or for an id that is no token."""
    check_token_ids(options, text.vocabulary)
    words: list[tuple[int, ...]] = []
    for place, word in enumerate(options.bad_words):
        field = f"bad_words[{place}]"
        try:
            with as_api_errors(field):
                found = await _encode_word(word, text)
        except TextTooLong as error:
            raise invalid_request(field, f"{field}: {error}") from error
        if not found or max(map(len, found)) > MAX_BAD_WORD_TOKENS:
            allowed = f"1 to {MAX_BAD_WORD_TOKENS} tokens of the model"
            raise invalid_request(field, f"{field}: must be {allowed}; give another word")
        words += found
    eos = text.defaults.eos  # that the model may always end its answer is transformers' rule, too
    words += [each for each in options.bad_words_ids if len(each) > 1 or each[0] not in eos]
    together = tuple(dict.fromkeys((*sampling.bad_words, *words)))
    if len(together) > MAX_BAD_WORDS:
        field = "bad_words_ids" if options.bad_words_ids else "bad_words"
        detail = f"{len(together)} sequences with the others and the model's own; at most {MAX_BAD_WORDS}"
        raise invalid_field(field, detail)
    return replace(sampling, bad_words=together)


async def _encode_word(word: str, text: ModelTokenizer) -> list[tuple[int, ...]]:
    """Return the word's tokens, and those with a blank before it if they differ as vLLM's `bad_words` has it."""
    plain = tuple(await text.encode(word, special=False))
    spaced = tuple(await text.encode(" " + word.lstrip(), special=False))
    found = [plain] if plain else []
    if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
        found.append(spaced)
    return found


def check_token_ids(options: SamplingOptions, vocabulary: int) -> None:
    """Raise ApiError for an id that is no token of the model."""
    named: dict[str, Iterable[int]] = {
        "logit_bias": (token for token, _ in options.logit_bias),
        "bad_words_ids": (token for word in options.bad_words_ids for token in word),
        "stop_token_ids": options.stop_token_ids,
        "allowed_token_ids": options.allowed_token_ids,
    }
    for field, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocabulary:
                allowed = f"token ids from 0 to {vocabulary - 1}"
                raise invalid_request(field, f"{field}: {token} is no token; allowed: {allowed}")
