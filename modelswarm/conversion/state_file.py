"""Files of `torch.save`: reads a state dict and the settings beside it. Runs no code of the file.

Used by `gpt2.py`. Knows no model.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelswarm.errors import UserError

FIELD = "STATE_DICT"
_PLACES = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which programs save a state dict beside other values."""
_SETTINGS = ("model_args", "config", "args")
"""Keys under which programs save the numbers of a model. nanoGPT's `config` is about training."""
_PREFIXES = ("_orig_mod.", "module.")
"""Prefixes of torch.compile and of DistributedDataParallel."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """The content of a file."""

    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any]  # numbers of the model, if the file has them


def read_state_file(path: Path) -> StateFile:
    """Read a state dict, or a dict that has one. Raise UserError for any other file."""
    if not path.is_file():
        raise UserError(FIELD, f"{path} is no file; allowed: a file of torch.save")
    content = _load(path)
    if not isinstance(content, Mapping):
        raise _not_a_state_dict(path, f"has a {type(content).__name__}")
    state = next(
        (found for found in (content, *map(content.get, _PLACES)) if _is_state_dict(found)), None
    )
    if state is None:
        shown = ", ".join(map(str, list(content)[:5])) or "nothing"
        raise _not_a_state_dict(path, f"has {shown}")
    settings: dict[str, Any] = {}
    if state is not content:
        for key in reversed(_SETTINGS):
            found = content.get(key)
            settings |= found if isinstance(found, Mapping) else {}
    tensors = {_without_prefixes(name): tensor for name, tensor in state.items()}
    if len(tensors) < len(state):
        prefixes = " and ".join(_PREFIXES)
        raise UserError(FIELD, f"has a tensor twice, with and without {prefixes}; allowed: one")
    return StateFile(tensors, settings)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(FIELD, f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        detail = "has other objects than tensors and plain values, or is no file of torch.save"
        allowed = "allowed: a file of torch.save(model.state_dict(), PATH)"
        raise UserError(FIELD, f"{path} {detail}; {allowed}") from error
    except Exception as error:  # torch raises many types for a damaged file
        detail = "is no whole file of torch.save; allowed: a state dict"
        raise UserError(FIELD, f"{path} {detail}") from error


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items())
    )


def _not_a_state_dict(path: Path, found: str) -> UserError:
    places = ", ".join(_PLACES)
    return UserError(
        FIELD, f"{path} {found}; allowed: a state dict, alone or under the key {places}"
    )


def _without_prefixes(name: str) -> str:
    prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
    return name if prefix is None else _without_prefixes(name.removeprefix(prefix))
