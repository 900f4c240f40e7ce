"""Changes of the logits before temperature and filters: bias, penalties and masks, each by its request's parameters.

The order of everything that the sampler does is that of transformers' `GenerationMixin._get_logits_processor`; steps
that only vLLM has stand where vLLM has them:

    1. logit_bias                                    SequenceBiasLogitsProcessor
    2. repetition_penalty, of the whole log          RepetitionPenaltyLogitsProcessor
    3. frequency_penalty, presence_penalty,          vLLM's apply_penalties
       of the tokens generated in this turn
    4. no_repeat_ngram_size, of the whole log        NoRepeatNGramLogitsProcessor
    5. bad_words, after the whole log                NoBadWordsLogitsProcessor
    6. min_tokens: no token of `eos` before          MinNewTokensLengthLogitsProcessor
    7. allowed_tokens                                vLLM's allowed_token_ids
    8. temperature                                   TemperatureLogitsWarper (`sampler.py`)
    9. top_k, top_p, min_p, typical_p                `filters.py`
    10. the draw                                     `noise.py`

Steps 4 to 7 set scores to -inf, so that their order does not matter. Everything is a pure function of logits,
parameters, log and begin. The one cache holds tables of parameters, and nothing of a session. Torch only, for the CPU
and accelerators alike: the host lists the entries to change, and each step changes those of all rows at once.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.attention.staging import to_device, to_index
from modelswarm_serving.model.base import SampleRequest

_MAX_TABLES = 512
"""Turns whose tables are kept; a mask has one byte per token of the vocabulary."""
_IDLE_ROUNDS = 4
"""Lookups for each kept table after which one that none was for is dropped."""
_MANY_COMPARED = 1 << 18
"""Tokens that are compared one by one for repeated n-grams, in some 2 ms; more take another way."""


@dataclass(slots=True)
class _Tables:
    """Tables that follow from the parameters alone."""

    sampling: Sampling  # keeps its identity, the cache's key, in use
    bias: tuple[Tensor, Tensor] | None  # token ids and values
    mask: Tensor | None  # [vocab]; true: never allowed
    endings: dict[int, list[tuple[int, ...]]]  # last token of a prefix -> bad words with it
    used_at: int = 0  # lookups before the last one of these


@dataclass(slots=True)
class _Entries:
    """Entries (row, token) of the logits with one value each."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, tokens: Iterable[int], values: Iterable[float] = ()) -> None:
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.rows.extend([row] * (len(self.tokens) - before))
        self.values.extend(values)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        rows, tokens = to_index([self.rows, self.tokens], device).unbind(0)
        return rows, tokens

    def values_on(self, device: torch.device) -> Tensor:
        return to_device(torch.tensor(self.values, dtype=torch.float32), device)


def apply_processors(logits: Tensor, picks: Sequence[SampleRequest]) -> Tensor:
    """Return the scores of `logits` [n, vocab] in float32 after steps 1 to 7; the input itself if no row has one."""
    if not any(is_processed(pick.sampling) for pick in picks):
        return logits
    scores = logits.clone()
    tables = [_cache.find(pick.sampling, logits.shape[1], logits.device) for pick in picks]
    for row, table in enumerate(tables):
        if table.bias is not None:
            scores[row].index_add_(0, *table.bias)
    _apply_repetition_penalty(scores, picks)
    _apply_count_penalties(scores, picks)
    banned = _Entries()
    for row, (pick, table) in enumerate(zip(picks, tables, strict=True)):
        banned.add(row, _within(_banned_tokens(pick, table), logits.shape[1]))
    if banned.rows:
        scores[banned.index(scores.device)] = -math.inf
    for row, table in enumerate(tables):
        if table.mask is not None:
            scores[row].masked_fill_(table.mask, -math.inf)
    return scores


def is_processed(sampling: Sampling) -> bool:
    """Return whether the parameters can change a score before the temperature."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.no_repeat_ngram_size > 0
        or sampling.min_tokens > 0
        or bool(sampling.logit_bias or sampling.bad_words or sampling.allowed_tokens)
    )


def _apply_repetition_penalty(scores: Tensor, picks: Sequence[SampleRequest]) -> None:
    """Change the score of each distinct token of the log once."""
    seen = _Entries()
    for row, pick in enumerate(picks):
        penalty = pick.sampling.repetition_penalty
        if penalty != 1.0:
            tokens = _within(set(pick.log), scores.shape[1])
            seen.add(row, tokens, [penalty] * len(tokens))
    if seen.rows:
        index, penalties = seen.index(scores.device), seen.values_on(scores.device)
        before = scores[index]
        scores[index] = torch.where(before < 0, before * penalties, before / penalties)


def _apply_count_penalties(scores: Tensor, picks: Sequence[SampleRequest]) -> None:
    """Subtract frequency_penalty times the count, and presence_penalty once, of each generated token."""
    seen = _Entries()
    for row, pick in enumerate(picks):
        frequency, presence = pick.sampling.frequency_penalty, pick.sampling.presence_penalty
        if frequency or presence:
            counts = Counter(pick.log[pick.begin :])
            tokens = _within(counts, scores.shape[1])
            seen.add(row, tokens, [frequency * counts[token] + presence for token in tokens])
    if seen.rows:
        index = seen.index(scores.device)
        scores[index] = scores[index] - seen.values_on(scores.device)


def _banned_tokens(pick: SampleRequest, tables: _Tables) -> set[int]:
    """Return the tokens that the log bans: steps 4 to 6."""
    sampling, log = pick.sampling, pick.log
    banned = repeated_ngram_ends(log, sampling.no_repeat_ngram_size)
    for word in tables.endings.get(log[-1], ()) if log else ():
        prefix = len(word) - 1
        if prefix <= len(log) and tuple(log[-prefix:]) == word[:-1]:
            banned.add(word[-1])
    if len(log) - pick.begin < sampling.min_tokens:
        banned.update(sampling.eos)
    return banned


def repeated_ngram_ends(log: Sequence[int], size: int) -> set[int]:
    """Return the tokens that would repeat an n-gram of this size; none for size 0."""
    if size == 0 or len(log) + 1 < size:
        return set()
    if size == 1:
        return set(log)
    found: set[int] = set()
    end, at = len(log) - 1, -1
    prefix = log[len(log) - size + 1 :]
    if log.count(prefix[-1]) * size > _MANY_COMPARED:
        return _ends_of_matches(log, prefix)
    while True:
        try:
            at = log.index(prefix[-1], at + 1, end)
        except ValueError:
            return found
        if at + 2 >= size and log[at + 2 - size : at + 1] == prefix:
            found.add(log[at + 1])


def _ends_of_matches(log: Sequence[int], prefix: Sequence[int]) -> set[int]:
    """Return the tokens that follow `prefix` in the log by Knuth, Morris and Pratt: in constant time per entry.

    Comparing the whole prefix wherever its last token occurs took 15 s in a log of 100,000 equal tokens.
    """
    # For each beginning of `prefix` the length of the next shorter one that it ends with.
    shorter, matched = [0], 0
    for token in prefix[1:]:
        while matched and prefix[matched] != token:
            matched = shorter[matched - 1]
        matched += prefix[matched] == token
        shorter.append(matched)
    found, matched = set(), 0
    for place, token in enumerate(log[:-1]):
        while matched and (matched == len(prefix) or prefix[matched] != token):
            matched = shorter[matched - 1]
        matched += prefix[matched] == token
        if matched == len(prefix):
            found.add(log[place + 1])
    return found


class TableCache:
    """The tables of running turns, each of which all tokens of a turn share; used by the engine's thread alone.

    Those that many lookups of others have overtaken are dropped: their turns have ended, or wait.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[int, int, torch.device], _Tables] = OrderedDict()
        self._lookups = 0

    def __len__(self) -> int:
        return len(self._tables)

    def find(self, sampling: Sampling, vocab: int, device: torch.device) -> _Tables:
        """Return the tables of these parameters, made now if there are none."""
        key = (id(sampling), vocab, device)
        found = self._tables.pop(key, None) or _make_tables(sampling, vocab, device)
        self._tables[key] = found
        self._lookups += 1
        found.used_at = self._lookups
        while len(self._tables) > _MAX_TABLES or self._is_oldest_idle():
            self._tables.popitem(last=False)
        return found

    def _is_oldest_idle(self) -> bool:
        oldest = next(iter(self._tables.values()))
        return self._lookups - oldest.used_at > _IDLE_ROUNDS * len(self._tables)


_cache = TableCache()


def _make_tables(sampling: Sampling, vocab: int, device: torch.device) -> _Tables:
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        if token < vocab:
            bias[token] = bias.get(token, 0.0) + value
    endings: dict[int, list[tuple[int, ...]]] = {}
    for word in sampling.bad_words:
        if len(word) > 1:
            endings.setdefault(word[-2], []).append(word)
    changes = torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)
    mask = _static_mask(sampling, vocab)
    return _Tables(
        sampling,
        (to_device(changes[0], device), to_device(changes[1], device)) if bias else None,
        None if mask is None else to_device(mask, device),
        endings,
    )


def _static_mask(sampling: Sampling, vocab: int) -> Tensor | None:
    """Return the mask of allowed_tokens and of bad words that are one token; None without them."""
    singles = _within((word[0] for word in sampling.bad_words if len(word) == 1), vocab)
    if not singles and not sampling.allowed_tokens:
        return None
    mask = torch.full((vocab,), bool(sampling.allowed_tokens))
    mask[torch.tensor(_within(sampling.allowed_tokens, vocab), dtype=torch.long)] = False
    mask[torch.tensor(singles, dtype=torch.long)] = True
    return mask


def _within(tokens: Iterable[int], vocab: int) -> list[int]:
    """Return the tokens that the model has: a tokenizer may have more."""
    return [token for token in tokens if token < vocab]
