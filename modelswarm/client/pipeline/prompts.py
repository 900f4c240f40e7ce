"""The prompts of a call: strings, message lists, token ids, or lists of these.

Checks their form before anything is sent, and orders them by length. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from modelswarm.client.integers import is_integer
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.errors import UserError

Message: TypeAlias = dict[str, Any]
CHARACTERS_PER_TOKEN = 4  # an estimate, only for the order
PROMPT_TOKEN_COST = 0.125  # of a generated token: prompts are read in chunks of many rows
FORMS = "a string, a list of messages, a list of token ids, or a list of these (not a pair with an image)"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; exactly one of its parts is set."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None

    def estimated_tokens(self) -> float:
        """Return about how many tokens it has."""
        if self.token_ids is not None:
            return float(len(self.token_ids))
        texts = [self.text or "", *(str(each.get("content", "")) for each in self.messages or ())]
        return sum(map(len, texts)) / CHARACTERS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one call, in its order."""

    items: tuple[Prompt, ...]
    is_single: bool  # the call gave one prompt, and gets one answer


def parse_prompts(given: Any) -> Prompts:
    """Return the prompts of a call. Raise UserError, which has the place of a prompt of another form."""
    one = _parse_one(given, "prompts")
    if one is not None:
        return Prompts((one,), is_single=True)
    if not isinstance(given, list):
        raise UserError("prompts", f"{_describe(given)} is no prompt; allowed: {FORMS}")
    items = []
    for place, each in enumerate(given):
        item = _parse_one(each, f"prompts[{place}]")
        if item is None:
            raise UserError(
                f"prompts[{place}]", f"{_describe(each)} is no prompt; allowed: {FORMS}"
            )
        items.append(item)
    return Prompts(tuple(items), is_single=False)


def _parse_one(given: Any, place: str) -> Prompt | None:
    """Return one prompt; None for another form, or for a list without entries."""
    if isinstance(given, str):
        return Prompt(text=given)
    if not isinstance(given, list) or not given:
        return None
    if all(isinstance(each, Mapping) for each in given):
        for number, message in enumerate(given):
            _check_message(message, f"{place}[{number}]")
        return Prompt(messages=tuple(dict(each) for each in given))
    if all(map(is_integer, given)):
        return Prompt(token_ids=tuple(given))
    return None


def parse_turn(given: Any) -> list[Message]:
    """Return the messages that one turn of a chat adds. UserError for other forms, and for a list without entries."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        found = "a list of other things" if isinstance(given, list) else _describe(given)
        raise UserError("prompt", f"{found} is no turn; allowed: a string, or a list of messages")
    if not given:
        raise UserError("prompt", "the list is empty; allowed: a string, or a list of messages")
    for number, message in enumerate(given):
        _check_message(message, f"prompt[{number}]")
    return [dict(message) for message in given]


def parse_texts(input_ids: Any) -> Prompts:
    """Return the texts of `get_ppl`. Raise UserError unless they are lists of at least two token ids."""
    is_one = isinstance(input_ids, list) and bool(input_ids) and is_integer(input_ids[0])
    texts = [input_ids] if is_one else input_ids
    if not isinstance(texts, list):
        detail = "allowed: a list of at least two token ids, or a list of such lists"
        raise UserError("input_ids", f"{_describe(input_ids)}; {detail}")
    for place, ids in enumerate(texts):
        if not isinstance(ids, list) or len(ids) < 2 or not all(map(is_integer, ids)):
            raise UserError(f"input_ids[{place}]", "allowed: a list of at least two token ids")
    return Prompts(tuple(Prompt(token_ids=tuple(ids)) for ids in texts), is_single=False)


def _check_message(message: Mapping[str, Any], place: str) -> None:
    if not isinstance(message.get("role"), str):
        raise UserError(place, "a message needs a role, such as user")
    if message.get("content") is None and not message.get("tool_calls"):
        raise UserError(place, "a message needs content")


def _describe(value: Any) -> str:
    return f"a value of the type {type(value).__name__}"


def configs_of(
    given: GenerationConfig | Sequence[GenerationConfig | None] | None, count: int
) -> tuple[GenerationConfig, ...]:
    """Return the config of each of `count` prompts. Raise UserError for another number of configs."""
    if given is None or isinstance(given, GenerationConfig):
        return (given or GenerationConfig(),) * count
    allowed = "allowed: a GenerationConfig, or a list with one per prompt"
    if not isinstance(given, Sequence):
        raise UserError("gen_config", f"{_describe(given)}; {allowed}")
    configs = tuple(GenerationConfig() if each is None else each for each in given)
    if not all(isinstance(each, GenerationConfig) for each in configs):
        raise UserError("gen_config", allowed)
    if len(configs) != count:
        raise UserError(
            "gen_config", f"{len(configs)} configs for {count} prompts; allowed: one, or {count}"
        )
    return configs


def check_config(given: object) -> None:
    """Raise UserError unless it is one config, or None."""
    if given is not None and not isinstance(given, GenerationConfig):
        raise UserError("gen_config", f"{_describe(given)}; allowed: a GenerationConfig, or None")


def check_switches(**switches: object) -> None:
    """Raise UserError for an argument that is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(name, f"{value!r} is not allowed; allowed: True or False")


def longest_first(prompts: Sequence[Prompt], configs: Sequence[GenerationConfig]) -> list[int]:
    """Return the indexes by decreasing work. Short answers at the end let all requests end at about one time."""

    def work(index: int) -> float:
        new = configs[index].max_new_tokens
        limit = float("inf") if new is None else float(new)
        return limit + PROMPT_TOKEN_COST * prompts[index].estimated_tokens()

    return sorted(range(len(prompts)), key=work, reverse=True)
