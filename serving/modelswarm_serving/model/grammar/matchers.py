"""The grammar matchers of a tail: a mask of the tokens that may follow, per session and step.

Where the grammar allows only one text, the token is forced: the first one of that text as the tokenizer writes it. So
each token is forced or not by the log alone, whatever the steps were that made the log.

A matcher is a cache. Its state is a function of the tokens that the turn has generated, `log[begin:]`. It is compared
with the log before each use, and advanced or built anew by replay. Those of ended sessions are dropped: one of a regex
took 12 MB in 100 tokens. Grammars are compiled by `prepare`, off the engine thread. llguidance never raises for a
grammar: its error state is looked at after every call. Knows no torch.

Copies of a matcher share its lexer, and the limit of its states. A lexer that other sessions have filled is replaced by
an empty one: whether a session can go on depends on its own text alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from modelswarm.checkpoint.generation_config import model_end_tokens
from modelswarm.protocol.messages import Grammar, Sampling
from modelswarm_serving.model.base import SampleRequest

VERSION = f"llguidance {llguidance.__version__}"
MAX_COMPILED = 64  # grammars that are kept compiled
MAX_UNUSED = (
    8  # of these, grammars that only ended sessions have used: each keeps a lexer with up to 100 MB
)
MAX_SESSIONS = 512  # matchers that are kept
IDLE_ROUNDS = 4  # masks for each kept matcher after which one that none was for is dropped
MAX_LEXER_STATES = 50_000  # of a compiled grammar and its copies; each takes up to 2 KB
_MAX_REASON = 300  # characters
_MAX_FORCED_BYTES = 256  # of a forced text, from which its first token is taken
_SPECIAL_MARK = b"\xff"  # of special tokens in forced text; no byte of UTF-8

Bits = NDArray[np.uint8]


class GrammarFault(Exception):
    """The session cannot be constrained any further; the text says why."""


@dataclass(slots=True)
class _SessionMatcher:
    grammar: str
    tokens: list[int]  # that the matcher has consumed
    matcher: LLMatcher
    compiled: LLMatcher  # that it is a copy of
    used_at: int = 0  # number of masks that were computed before its last one


class GrammarMatchers:
    """Matchers for one tokenizer. `prepare` may run in other threads than `mask`."""

    def __init__(self, tokenizer: Path, vocab: int) -> None:
        """`tokenizer`: tokenizer.json. `vocab`: width of the logits."""
        self._path, self._vocab = tokenizer, vocab
        # One bit for each logit, in whole words of 32. llguidance's masks are longer.
        self._logits: Bits = np.packbits(
            np.arange((vocab + 31) // 32 * 32) < vocab, bitorder="little"
        )
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._sessions: OrderedDict[int, _SessionMatcher] = OrderedDict()  # oldest use first
        self._filled: set[str] = set()  # texts of compiled grammars that sessions have used
        self._masks = 0

    @property
    def version(self) -> str:
        return VERSION

    def start(self) -> str:
        """Build the tokenizer; return why it cannot be used, empty if it can."""
        try:
            self.load()
        except (ValueError, OSError) as error:
            return f"{VERSION} cannot use the model's tokenizer: {error}"
        return ""

    def load(self) -> LLTokenizer:
        """Build the tokenizer once: 0.1 to 1 s, at the start of a server, so that no recovery waits for it."""
        with self._lock:
            if self._tokenizer is None:
                made = self._read_tokenizer()
                _warm_up(made)
                self._tokenizer = made
            return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        """Return the tokenizer. llguidance never lets its end token come as text, and knows the usual ones by name.

        It takes token 0 where no token has such a name. If that is a text, a special end token of the model is named.
        """
        text = self._path.read_text("utf-8")
        width: int | None = self._vocab
        try:
            made = LLTokenizer(text, n_vocab=width)
        except ValueError:  # special tokens lie behind the logits: it needs a place for each
            width, made = None, LLTokenizer(text)
        if made.is_special_token(made.eos_token):
            return made
        known = [token for token in model_end_tokens(self._path.parent) if token < self._vocab]
        ends = [token for token in known if made.is_special_token(token)]
        return LLTokenizer(text, n_vocab=width, eos_token=ends) if ends else made

    def prepare(self, grammar: Grammar) -> str | None:
        """Compile the grammar; return why it cannot be used. Called off the engine thread."""
        try:
            self._compile(grammar)
        except (GrammarFault, ValueError, OSError) as fault:  # the last two: of the tokenizer
            return str(fault)
        return None

    def _compile(self, grammar: Grammar, full: Sequence[LLMatcher] = ()) -> tuple[LLMatcher, bool]:
        """Return a matcher of which nothing is consumed, and whether it is new. `full`: matchers with full lexers."""
        tokenizer = self.load()
        with self._lock:
            found = self._compiled.get(grammar.text)
            if found is not None and all(found is not each for each in full):
                self._compiled.move_to_end(grammar.text)
                return found, False
        made = LLMatcher(tokenizer, grammar.text, log_level=0, limits=self._limits)
        made.compute_bitmask()  # copies of the matcher have what the first mask took to compute
        if made.is_error():
            raise _fault(grammar, made.get_error())
        with self._lock:
            self._compiled[grammar.text] = made
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return made, True

    def mask(self, pick: SampleRequest) -> bytes:
        """Return the tokens that may come next, one bit each, from the lowest bit of each byte. Raise GrammarFault.

        The tokens that end the sequence may come only where the grammar is complete.
        """
        grammar = pick.sampling.grammar
        assert grammar is not None
        generated = list(pick.log[pick.begin : pick.position])
        full: list[LLMatcher] = []
        while True:
            entry, is_new = self._take_entry(pick.session, grammar, generated, full)
            try:
                self._advance(entry, pick, generated)
                return self._mask_now(entry.matcher, pick)
            except GrammarFault:
                self._sessions.pop(pick.session, None)
                if is_new:
                    raise
            full.append(entry.compiled)  # perhaps: a full lexer may show as a refused token

    def _mask_now(self, matcher: LLMatcher, pick: SampleRequest) -> bytes:
        grammar = pick.sampling.grammar
        assert grammar is not None
        forced = self._forced_token(matcher, pick.sampling)
        if forced is not None:
            only = np.zeros_like(self._logits)
            _set_bits(only, (forced,), True)
            return only.tobytes()
        whole = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        bits = whole[: len(self._logits)] & self._logits
        if matcher.is_error():
            raise _fault(grammar, matcher.get_error())
        if np.count_nonzero(bits) == 1:
            found = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            _set_bits(bits, found, False)
            _set_bits(bits, [_spelled(self.load(), matcher, each) for each in found], True)
        _set_bits(bits, self.load().eos_tokens, False)
        _set_bits(bits, pick.sampling.eos, matcher.is_accepting())
        if not bits.any():
            raise _fault(grammar, "no token may follow")
        return bits.tobytes()

    def forced_after(self, pick: SampleRequest, token: int) -> tuple[int, ...]:
        """Return the tokens that must follow the sampled one, at most as many as requested.

        Called after `mask`. A matcher in error is dropped, and the next call of `mask` says why.
        """
        entry = self._sessions.get(pick.session)
        forced: list[int] = []
        if entry is None or not pick.max_forced or token in pick.sampling.eos:
            return ()
        new: int | None = token
        while new is not None:
            if not entry.matcher.consume_token(new):
                del self._sessions[pick.session]
                break
            entry.tokens.append(new)
            if len(forced) == pick.max_forced:
                break
            new = self._forced_token(entry.matcher, pick.sampling)
            if new is not None:
                forced.append(new)
        return tuple(forced)

    def _forced_token(self, matcher: LLMatcher, sampling: Sampling) -> int | None:
        """Return the only token that may come next; None if there is a choice, or if another rule might ban it.

        None for a token without a logit, too, which the model can neither give nor read.
        """
        if sampling.bad_words or sampling.allowed_tokens or sampling.no_repeat_ngram_size:
            return None
        found = self._forced_tokens(matcher)
        if not found or found[0] in sampling.eos or found[0] in self.load().eos_tokens:
            return None
        only = _spelled(self.load(), matcher, found[0])
        return only if only < self._vocab else None

    def _forced_tokens(self, matcher: LLMatcher) -> list[int]:
        """Return the tokens of the only text that may come next, of a long one those of its beginning.

        llguidance tokenizes all of it each time: 40 ms for 100 KB, for each token of a step.
        """
        text = matcher.compute_ff_bytes()
        text, is_long = text[:_MAX_FORCED_BYTES], len(text) > _MAX_FORCED_BYTES
        plain = text.partition(_SPECIAL_MARK)[0]
        if is_long and plain:
            return self.load().tokenize_bytes(plain)
        return matcher.compute_ff_tokens()

    def _take_entry(
        self, session: int, grammar: Grammar, generated: list[int], full: Sequence[LLMatcher]
    ) -> tuple[_SessionMatcher, bool]:
        """Return a matcher that has consumed none or some of the tokens, and whether it was compiled just now."""
        entry = self._sessions.pop(session, None)
        if (
            entry is not None
            and entry.grammar == grammar.text
            and entry.tokens == generated[: len(entry.tokens)]
        ):
            return entry, False
        compiled, is_new = self._compile(grammar, full)
        self._filled.add(grammar.text)
        return _SessionMatcher(grammar.text, [], compiled.deep_copy(), compiled), is_new

    def _advance(self, entry: _SessionMatcher, pick: SampleRequest, generated: list[int]) -> None:
        """Let the matcher consume the other tokens that the turn has generated, and keep it for the session."""
        new = generated[len(entry.tokens) :]
        taken = entry.matcher.try_consume_tokens(new) if new else 0
        if taken < len(new) or entry.matcher.is_error():
            place = pick.begin + len(entry.tokens) + taken
            detail = entry.matcher.get_error() or f"it refuses the token at position {place}"
            assert pick.sampling.grammar is not None
            raise _fault(pick.sampling.grammar, detail)
        entry.tokens, entry.used_at = generated, self._masks
        self._sessions[pick.session] = entry
        self._masks += 1
        self._drop_idle()

    def _drop_idle(self) -> None:
        """Drop matchers of sessions that others have overtaken, as they ended or wait, and lexers that only they used.

        The end of a session is not told here.
        """
        count = len(self._sessions)
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            idle = self._masks - oldest.used_at > IDLE_ROUNDS * len(self._sessions)
            if not idle and len(self._sessions) <= MAX_SESSIONS:
                break
            self._sessions.popitem(last=False)
        if len(self._sessions) == count:
            return
        used = {entry.grammar for entry in self._sessions.values()}
        with self._lock:
            unused = [text for text in self._compiled if text in self._filled and text not in used]
            for text in unused[:-MAX_UNUSED]:
                del self._compiled[text]
            self._filled.intersection_update(self._compiled)


def _spelled(tokenizer: LLTokenizer, matcher: LLMatcher, token: int) -> int:
    """Return the token; if it is a special one that the matcher refuses, the first one that spells the forced text.

    llguidance cuts forced text as the model's tokenizer does, which may find special tokens in it. Its own texts never
    match those.
    """
    if not tokenizer.is_special_token(token) or matcher.validate_tokens([token]):
        return token
    text = matcher.compute_ff_bytes()[:_MAX_FORCED_BYTES].decode("utf-8", "ignore")
    return next(iter(tokenizer.greedy_tokenize(text)), token)


def _warm_up(tokenizer: LLTokenizer) -> None:
    """Compute masks at the usual places of JSON: the tokenizer's tables for them are made at their first use."""
    grammar = LLMatcher.grammar_from_json_schema('{"type": "object"}')
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    for text in ("", '{"', 'name": ', '[1, "'):
        matcher.consume_tokens(tokenizer.greedy_tokenize(text))
        matcher.compute_bitmask()


def _set_bits(bits: Bits, tokens: Sequence[int], value: bool) -> None:
    for token in tokens:
        if 0 <= token < 8 * len(bits):
            place, bit = token >> 3, np.uint8(1 << (token & 7))
            bits[place] = bits[place] | bit if value else bits[place] & ~bit


def _fault(grammar: Grammar, detail: str) -> GrammarFault:
    """Return the fault as one sentence; it names both libraries where they differ."""
    words = " ".join(detail.split("\n<state>")[0].split())[:_MAX_REASON]
    other = f" ({grammar.version} had checked it)" if grammar.version != VERSION else ""
    return GrammarFault(f"the grammar cannot be followed by {VERSION}{other}: {words}")
