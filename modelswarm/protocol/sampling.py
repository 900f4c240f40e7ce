"""Parameters of the tail, and what it reports with a token; part of `messages.py`, which exports all names.

They travel once per turn, in `Turn.sampling`, never with a token. A gateway that takes a session over finds them in the
first LogChunk. `find_problem` states the limits that hold on the wire; the gateway's own limits are narrower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelswarm.protocol.identity import Epoch, Handle

MAX_LOGPROBS = 20
"""Top alternatives that a request may ask for; OpenAI's limit, and vLLM's default."""
MAX_LOGIT_BIAS = 1024
"""Entries of a logit bias; OpenAI allows 300."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_ALLOWED_TOKENS = 1 << 18
"""At least the size of today's vocabularies, and 5 bytes each fit into a frame beside the other fields."""
MAX_GRAMMAR_BYTES = 1 << 20
MAX_FORCED_TOKENS = 16
"""Forced tokens in one step of a session: with 16 KiB a row, their rows take 20 ms at 100 Mbit/s."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The language that the generated tokens of a turn must form."""

    text: str  # llguidance's own grammar: the JSON or Lark text that its LLMatcher takes
    version: str  # library and version that checked it, such as "llguidance 1.9.1"
    # Forced tokens that may follow a sampled one in its step. 0: each has a step, for its log probability.
    max_forced: int = 0


@dataclass(frozen=True, slots=True)
class ReturnedRows:
    """Rows that the tail returns to the gateway: of every log entry from `start` on that it runs, in order.

    A row is the entry's logits and then its last hidden state, as far as they are wanted, in the servers' dtype.
    """

    start: int
    logits: bool = False  # vocabulary numbers: of the entry after it
    hidden_states: bool = False  # hidden size numbers, after the final norm


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of the tail. Equal (logits, params, log, begin, position) give an equal token (I4; R17, sampling).

    `begin` is the turn's: the tokens generated so far are `log[begin:]`.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over the whole log
    seed: int = 0  # unsigned 64 bit
    choice: int = 0
    eos: tuple[int, ...] = ()  # ids that end the sequence, with the request's stop_token_ids
    logprobs: int = 0  # top alternatives to report with a token, at most MAX_LOGPROBS
    typical_p: float = 1.0
    presence_penalty: float = 0.0  # over the generated tokens, as is frequency_penalty
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0  # over the whole log; 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    min_tokens: int = 0  # no token of `eos` before so many generated ones
    allowed_tokens: tuple[int, ...] = ()  # empty: all
    prompt_logprobs: int = -1  # top alternatives per token of the prompt; -1: no report
    grammar: Grammar | None = None
    returned: ReturnedRows | None = None  # rows of logits and hidden states


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most probable tokens, by the distribution of the unchanged logits."""

    token: int
    logprob: float  # natural log


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Log probability of a token of the prompt after the tokens before it."""

    token: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt's entries [start, start + len(entries)), from the tail, before any Token."""

    handle: Handle  # the gateway's
    epoch: Epoch
    start: int
    entries: tuple[PromptLogprob, ...]


def find_problem(sampling: Sampling) -> str | None:
    """Return the first field that no gateway sends, with the allowed values; None for valid parameters."""
    for name, is_valid, allowed in (
        (
            "temperature",
            sampling.temperature == 0 or 1e-9 <= sampling.temperature < math.inf,
            "0, or at least 1e-9",
        ),
        ("top_p", 0 <= sampling.top_p <= 1, "0 to 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "0 to 1"),
        ("typical_p", 0 < sampling.typical_p <= 1, "above 0 and at most 1"),
        ("repetition_penalty", 1e-6 <= sampling.repetition_penalty <= 1e6, "1e-6 to 1e6"),
        ("presence_penalty", abs(sampling.presence_penalty) <= 1000, "-1000 to 1000"),
        ("frequency_penalty", abs(sampling.frequency_penalty) <= 1000, "-1000 to 1000"),
        ("logprobs", 0 <= sampling.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        (
            "prompt_logprobs",
            -1 <= sampling.prompt_logprobs <= MAX_LOGPROBS,
            f"-1 to {MAX_LOGPROBS}",
        ),
    ):
        if not is_valid:
            return f"{name} is {getattr(sampling, name)}; allowed: {allowed}"
    return _find_long_field(sampling)


def _find_long_field(sampling: Sampling) -> str | None:
    for name, limit in (
        ("logit_bias", MAX_LOGIT_BIAS),
        ("bad_words", MAX_BAD_WORDS),
        ("allowed_tokens", MAX_ALLOWED_TOKENS),
    ):
        if len(getattr(sampling, name)) > limit:
            return f"{name} has {len(getattr(sampling, name))} entries; allowed: {limit}"
    if not all(abs(bias) <= 1e6 for _, bias in sampling.logit_bias):
        return "logit_bias has a value outside -1e6 to 1e6"
    if not all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in sampling.bad_words):
        return f"bad_words has a sequence without tokens, or of more than {MAX_BAD_WORD_TOKENS}"
    grammar = sampling.grammar
    if grammar is not None and len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        return f"grammar has more than {MAX_GRAMMAR_BYTES} bytes"
    returned = sampling.returned
    if returned is not None and not (returned.logits or returned.hidden_states):
        return "returned asks for neither logits nor hidden_states"
    if returned is not None and grammar is not None and grammar.max_forced:
        return f"max_forced is {grammar.max_forced}; allowed with returned rows: 0"
    if grammar is not None and not 0 <= grammar.max_forced <= MAX_FORCED_TOKENS:
        return f"max_forced is {grammar.max_forced}; allowed: 0 to {MAX_FORCED_TOKENS}"
    return None
