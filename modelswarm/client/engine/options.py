"""Options and prompts of the engine's verbs that generate texts. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from modelswarm.client.integers import is_integer
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.errors import UserError

Prompt: TypeAlias = "str | list[int]"
"""A text, or token ids."""
NEW_TOKENS = 64  # of an answer, as in rosellm


class GenerateOptions(TypedDict, total=False):
    """Options of the verbs that generate texts; `Engine.generate` explains them."""

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_on_eos: bool
    truncate_prompt: bool


def check_names(options: Mapping[str, Any]) -> None:
    """Raise UserError for the first name that is no option."""
    allowed = ", ".join(GenerateOptions.__annotations__)
    for name in options:
        if name not in GenerateOptions.__annotations__:
            raise UserError(name, f"there is no such option; allowed: {allowed}")


def parse_options(
    *,
    max_new_tokens: int = NEW_TOKENS,
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_on_eos: bool = True,
    truncate_prompt: bool = False,
) -> tuple[GenerationConfig, bool]:
    """Return the config of the answers, and whether prompts are truncated. Raise UserError, which names the option."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    wanted: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    wanted |= {name: value for name, value in given.items() if value is not None}
    for name, switch in (("stop_on_eos", stop_on_eos), ("truncate_prompt", truncate_prompt)):
        if not isinstance(switch, bool):
            raise UserError(name, f"{switch!r} is not allowed; allowed: True or False")
    try:
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            random_seed=seed,
            ignore_eos=not stop_on_eos,
            **wanted,
        )
    except UserError as error:
        if error.field != "random_seed":
            raise
        raise UserError("seed", error.message) from None
    return config, truncate_prompt


def check_prompts(prompts: Sequence[Prompt], vocab_size: int | None) -> list[Prompt]:
    """Return the prompts as a list. Raise UserError for other forms, and for ids that the model does not have."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        detail = "allowed: a list of texts or of lists of token ids"
        raise UserError("prompts", f"a value of the type {type(prompts).__name__}; {detail}")
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            _check_ids(f"prompts[{place}]", prompt, vocab_size)
    return list(prompts)


def _check_ids(name: str, ids: Any, vocab_size: int | None) -> None:
    is_list = isinstance(ids, list) and bool(ids)
    if not is_list or not all(map(is_integer, ids)):
        raise UserError(name, "allowed: a text, or a list of at least one token id")
    limit = 1 << 32 if vocab_size is None else vocab_size
    for each in ids:
        if not 0 <= each < limit:
            detail = f"the vocabulary has the ids 0 to {limit - 1}"
            raise UserError(name, f"{each} is no token of the model; {detail}")
