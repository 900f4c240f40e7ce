"""Values of generate's arguments, checked before anything is sent; transformers ignores many wrong ones."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.integers import is_integer
from modelswarm.errors import ModelSwarmError

_MOST = (1 << 31) - 1  # of integers in the messages of servers
_COUNT, _SIZE = (1, _MOST), (0, _MOST)
_INTEGERS = {
    **dict.fromkeys(("max_length", "max_new_tokens", "num_beams", "num_return_sequences"), _COUNT),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), _COUNT),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k"), _SIZE),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _SIZE),
}
"""Arguments that are integers -> the least and the most."""
_FLOATS = {
    **dict.fromkeys(("max_time", "temperature"), (0.0, math.inf)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (0.0, math.inf)),
    **dict.fromkeys(("length_penalty", "guidance_scale"), (-math.inf, math.inf)),
    **dict.fromkeys(("top_p", "min_p", "top_h", "typical_p"), (0.0, 1.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "assistant_ensemble_weight"), (0.0, 1.0)),
}
"""Arguments that are numbers -> the least and the most."""
_SWITCHES = frozenset(
    {
        *("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "token_healing"),
        *("output_scores", "output_logits", "return_dict_in_generate"),
    }
)
_TOKENS = frozenset(
    {
        *("eos_token_id", "pad_token_id", "bos_token_id", "forced_bos_token_id"),
        *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    }
)
_ONE_TOKEN = frozenset({"pad_token_id", "bos_token_id", "forced_bos_token_id"})


def check_values(given: Mapping[str, Any], defaults: Mapping[str, Any], vocabulary: int) -> None:
    """Raise ArgumentError for the first wrong value. Those of `defaults`, the model's own, are not checked."""
    for name, value in given.items():
        if value is None or (name in defaults and _is_equal(value, defaults[name])):
            continue
        if name in _SWITCHES and not isinstance(value, bool):
            raise ArgumentError(name, f"{value!r}; allowed: True or False")
        if name in _INTEGERS:
            check_integer(name, value, *_INTEGERS[name])
        elif name in _FLOATS:
            _check_float(name, value, *_FLOATS[name])
        elif name in _TOKENS:
            _check_tokens(name, value, vocabulary)
        elif name in _OBJECTS:
            is_right, allowed = _OBJECTS[name]
            if not is_right(value):
                raise ArgumentError(name, f"a {type(value).__name__}; allowed: {allowed}")


def check_config(config: Any) -> None:
    """Raise ArgumentError unless this is None, or a configuration of transformers."""
    if config is not None and not isinstance(config, GenerationConfig):
        detail = "allowed: a GenerationConfig of transformers"
        raise ArgumentError("generation_config", f"a {type(config).__name__}; {detail}")


def check_integer(name: str, value: Any, least: int, most: int = _MOST) -> None:
    """Raise ArgumentError unless the value is an integer from `least` to `most`."""
    if not is_integer(value) or not least <= value <= most:
        raise ArgumentError(name, f"{value!r}; allowed: an integer from {least} to {most}")


def _check_float(name: str, value: Any, least: float, most: float) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and not math.isnan(value) and least <= value <= most:
        return
    allowed = "a number" if math.isinf(least) else f"a number from {least:g}"
    raise ArgumentError(
        name, f"{value!r}; allowed: {allowed}" + (f" to {most:g}" if most == 1 else "")
    )


def _check_tokens(name: str, value: Any, vocabulary: int) -> None:
    """Raise ArgumentError unless the value is a token id of the model, or several where several are allowed."""
    found = value.tolist() if isinstance(value, torch.Tensor) else value
    several = found if isinstance(found, (list, tuple)) else [found]
    is_one = several is not found
    if (is_one and "suppress" in name) or (not is_one and name in _ONE_TOKEN):
        detail = "allowed: a token id" if name in _ONE_TOKEN else "allowed: a list of token ids"
        raise ArgumentError(name, f"a {type(value).__name__}; {detail}")
    for token in several:
        if not is_integer(token) or not 0 <= token < vocabulary:
            detail = f"the vocabulary has the ids 0 to {vocabulary - 1}"
            raise ArgumentError(name, f"{token!r} is no token of the model; {detail}")
    if name == "suppress_tokens" and len(set(several)) == vocabulary:
        raise ArgumentError(name, "every token is suppressed; allowed: all but one")


def _is_equal(value: Any, default: Any) -> bool:
    return (
        type(value) is type(default)
        and not isinstance(value, torch.Tensor)
        and bool(value == default)
    )


def _are_callable(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(callable, value))


def _is_streamer(value: Any) -> bool:
    return callable(getattr(value, "put", None)) and callable(getattr(value, "end", None))


def _is_model(value: Any) -> bool:
    return callable(getattr(value, "generate", None)) and hasattr(value, "generation_config")


def _has_biases(value: Any) -> bool:
    pairs = [*value.items()] if isinstance(value, dict) else value
    return isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    )


_OBJECTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "streamer": (_is_streamer, "an object with put and end, as TextStreamer of transformers"),
    "logits_processor": (_are_callable, "a list of processors, as LogitsProcessorList"),
    "stopping_criteria": (_are_callable, "a list of criteria, as StoppingCriteriaList"),
    "prefix_allowed_tokens_fn": (callable, "a function"),
    "assistant_model": (_is_model, "a model of transformers"),
    "custom_generate": (lambda value: isinstance(value, str) or callable(value), "a function"),
    "sequence_bias": (_has_biases, "a dictionary of tuples of token ids to numbers"),
}


@contextmanager
def named_errors(given: Mapping[str, Any], has_begun: Callable[[], bool]) -> Iterator[None]:
    """Raise ArgumentError in place of a ValueError of transformers, which checks its arguments.

    An error behind the first token, as of a caller's own processor, stays as it is.
    """
    try:
        yield
    except ValueError as error:
        if isinstance(error, ModelSwarmError) or has_begun():
            raise
        sentence = " ".join(str(error).split())
        name = next((name for name in given if name in sentence), "generate")
        raise ArgumentError(name, sentence) from error
