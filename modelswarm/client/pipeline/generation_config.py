"""`GenerationConfig`: the limits and the sampling of answers, with LMDeploy's names and defaults.

Every field has an effect or is refused by name when the config is made. `request_fields` gives the fields of the
gateway's API. Sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from modelswarm.client.answer_rows import KINDS, WantedRows
from modelswarm.client.integers import is_integer
from modelswarm.errors import UserError

MAX_STOPS = 16  # limits of the gateway, docs/api.md
MAX_STOP_LENGTH = 1000
MAX_BAD_STRINGS = 256
MAX_BAD_WORD_LENGTH = 200
MAX_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_REPETITION_PENALTY = 10.0
BAN = -100.0  # added to the logit of a bad token, as OpenAI's API has it
FORMATS = ("text", "json_object", "json_schema", "regex_schema")
_TOKEN_NAME = re.compile(r"token_id:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Options of an answer. Raises UserError, which names the field, for a value without an effect.

    The answer is greedy unless `do_sample` is true. Lengths are tokens.
    """

    n: int = 1  # answers of a prompt; only 1, as in LMDeploy
    max_new_tokens: int | None = 512  # None: up to the end of the context
    do_sample: bool = False
    top_p: float = 1.0  # above 0, at most 1
    top_k: int = 50  # 0: off
    min_p: float = 0.0  # 0 to 1
    temperature: float = 0.8  # 0 to 2
    repetition_penalty: float = 1.0  # above 0, at most 10
    ignore_eos: bool = False
    random_seed: int | None = None  # None: each prompt draws one; a greedy answer needs none
    stop_words: str | Sequence[str] | None = None  # of any number of tokens each
    bad_words: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives per token, 1 to 20
    response_format: Mapping[str, Any] | None = None
    include_stop_str_in_output: bool = False
    output_logits: str | None = None  # "all", or "generation": the rows that lead to new tokens
    output_last_hidden_state: str | None = None  # the same
    # Each of these has one allowed value, which changes nothing.
    spaces_between_special_tokens: bool = True
    logits_processors: Sequence[Callable[..., Any]] | None = None
    return_ppl: bool = False
    return_routed_experts: bool = False
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: object | None = None
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0

    def __post_init__(self) -> None:
        for name, reason in _REFUSED.items():
            if getattr(self, name) != _DEFAULTS[name]:
                raise UserError(name, f"{reason}; allowed: {_DEFAULTS[name]!r}")
        for name, (holds, allowed) in _RANGES.items():
            value = getattr(self, name)
            if not holds(value) and not (value is None and name in _OPTIONAL):
                raise UserError(name, f"{value!r} is not allowed; allowed: {allowed}")
        _check_strings("stop_words", self.stop_words, MAX_STOPS, MAX_STOP_LENGTH)
        _check_strings("bad_words", self.bad_words, MAX_BAD_STRINGS, MAX_BAD_WORD_LENGTH)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        _check_token_ids("bad_token_ids", self.bad_token_ids)
        self._check_lengths()
        self._check_sampling()
        self._check_format()

    def _check_lengths(self) -> None:
        least, most = self.min_new_tokens, self.max_new_tokens
        if least is not None and most is not None and least > most:
            detail = f"{least} is above max_new_tokens, which is {most}; allowed: at most that"
            raise UserError("min_new_tokens", detail)

    def _check_sampling(self) -> None:
        """Refuse a value that only sampling would use. Greedy values change nothing and are allowed."""
        if self.do_sample:
            return
        for name, greedy in (("top_p", None), ("top_k", 1), ("min_p", None), ("temperature", 0)):
            if getattr(self, name) not in (_DEFAULTS[name], greedy):
                detail = "it has an effect only on sampling; set do_sample=True, or leave it out"
                raise UserError(name, detail)

    def _check_format(self) -> None:
        form = self.response_format
        if form is None:
            return
        kind = form.get("type") if isinstance(form, Mapping) else None
        if kind not in FORMATS:
            raise UserError(
                "response_format",
                f"its type is {kind!r}; allowed: a mapping with the type {', '.join(FORMATS)}",
            )
        if kind in ("json_schema", "regex_schema"):
            _check_schema(kind, form.get(kind))
        if self.ignore_eos and kind != "text":
            raise UserError(
                "ignore_eos", "a structured answer ends by itself; leave ignore_eos out"
            )

    @property
    def wanted_rows(self) -> WantedRows:
        """The rows of the answer that `Response` shall have."""
        return WantedRows(self.output_logits, self.output_last_hidden_state)

    def request_fields(self, room: int, seed: int) -> dict[str, Any]:
        """Return the fields of a text completion. `room`: positions of the context; `seed`: if the config has none."""
        limit = room if self.max_new_tokens is None else self.max_new_tokens
        found: dict[str, Any] = {
            "max_tokens": limit,
            "repetition_penalty": self.repetition_penalty,
            "skip_special_tokens": self.skip_special_tokens,
            "return_token_ids": True,
            "temperature": self.temperature if self.do_sample else 0.0,
        }
        if self.do_sample:
            found |= {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
            found["seed"] = seed if self.random_seed is None else self.random_seed
        optional = {
            "stop": _as_list(self.stop_words),
            "bad_words": _as_list(self.bad_words),
            "stop_token_ids": list(self.stop_token_ids or ()),
            "logit_bias": {str(token): BAN for token in self.bad_token_ids or ()},
            "min_tokens": self.min_new_tokens,
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        found |= {name: value for name, value in optional.items() if value}
        if self.logprobs is not None:
            found |= {"logprobs": self.logprobs, "return_tokens_as_token_ids": True}
        # JSON has no integers of numpy.
        plain = {name: int(each) if is_integer(each) else each for name, each in found.items()}
        return plain | self._format_fields()

    def _format_fields(self) -> dict[str, Any]:
        form = self.response_format
        if form is None or form["type"] == "text":
            return {}
        if form["type"] == "regex_schema":
            return {"structured_outputs": {"regex": form["regex_schema"]}}
        return {"response_format": dict(form)}


def token_id_of(name: str) -> int:
    """Return the id of a token as log probabilities name it, `token_id:5`."""
    found = _TOKEN_NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} names no token")
    return int(found[1])


def _check_schema(kind: str, schema: object) -> None:
    if schema is None:
        raise UserError("response_format", f"of the type {kind} it needs the key {kind}")
    is_fine, allowed = isinstance(schema, Mapping), "a mapping with the key schema"
    if kind == "regex_schema":
        is_fine, allowed = isinstance(schema, str), "a string"
    if not is_fine:
        raise UserError("response_format", f"{kind} is {schema!r}; allowed: {allowed}")


def _as_list(words: str | Sequence[str] | None) -> list[str]:
    return [words] if isinstance(words, str) else list(words or ())


def _check_strings(name: str, value: Any, most: int, longest: int) -> None:
    """Refuse what is neither a string nor a list of strings. `longest`: characters."""
    entries = [value] if isinstance(value, str) else value
    fine = value is None or (
        isinstance(entries, Sequence)
        and len(entries) <= most
        and all(isinstance(each, str) and 1 <= len(each) <= longest for each in entries)
    )
    if not fine:
        allowed = f"at most {most} strings of 1 to {longest} characters"
        raise UserError(name, f"{value!r} is not allowed; allowed: {allowed}")


def _check_token_ids(name: str, value: Any) -> None:
    fine = value is None or (
        isinstance(value, Sequence)
        and len(value) <= MAX_TOKEN_IDS
        and all(is_integer(each) and each >= 0 for each in value)
    )
    if not fine:
        allowed = f"at most {MAX_TOKEN_IDS} token ids"
        raise UserError(name, f"{value!r} is not allowed; allowed: {allowed}")


def _is_number(value: Any) -> bool:
    return is_integer(value) or isinstance(value, float)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(GenerationConfig)}
_SWITCH = (_is_switch, "True or False")
_ROWS = (lambda value: value in KINDS, f"{' or '.join(map(repr, KINDS))}, or None")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: is_integer(v) and v == 1, "1; repeat the prompt to get more answers"),
    "max_new_tokens": (lambda v: is_integer(v) and v >= 1, "a whole number from 1, or None"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, at most 1"),
    "top_k": (lambda v: is_integer(v) and v >= 0, "a whole number from 0 (0: off)"),
    "min_p": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "temperature": (lambda v: _is_number(v) and 0 <= v <= 2, "a number from 0 to 2"),
    "repetition_penalty": (
        lambda v: _is_number(v) and 0 < v <= MAX_REPETITION_PENALTY,
        f"a number above 0, at most {MAX_REPETITION_PENALTY:g}",
    ),
    "random_seed": (
        lambda v: is_integer(v) and -(2**63) <= v < 2**64,
        "a whole number from -2^63 to 2^64 - 1",
    ),
    "min_new_tokens": (lambda v: is_integer(v) and v >= 0, "a whole number from 0"),
    "logprobs": (
        lambda v: is_integer(v) and 1 <= v <= MAX_LOGPROBS,
        f"a whole number from 1 to {MAX_LOGPROBS}",
    ),
    "output_logits": _ROWS,
    "output_last_hidden_state": _ROWS,
    "do_sample": _SWITCH,
    "ignore_eos": _SWITCH,
    "skip_special_tokens": _SWITCH,
    "include_stop_str_in_output": _SWITCH,
}
_OPTIONAL = (
    *("max_new_tokens", "random_seed", "min_new_tokens", "logprobs"),
    *("output_logits", "output_last_hidden_state"),
)
_REFUSED = {
    "spaces_between_special_tokens": "the tokenizer's own decoder joins tokens",
    "logits_processors": "servers run no code of clients; use bad_words or response_format",
    "return_ppl": "answers have no perplexity; logprobs gives log probabilities",
    "return_routed_experts": "no experts are reported",
    "with_cache": "a session keeps its cache; use pipe.session()",
    "preserve_cache": "a session keeps its cache; use pipe.session()",
    "migration_request": "the gateway chooses the servers of an answer",
    "repetition_ngram_size": "answers are not ended for repetitions; use repetition_penalty",
    "repetition_ngram_threshold": "answers are not ended for repetitions; use repetition_penalty",
}
