"""The JSON of `convert`: the folder that was written, and the sizes of its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def conversion_fields(
    folder: Path, config: Mapping[str, Any], *, has_tokenizer: bool
) -> dict[str, Any]:
    """Return the object of `convert --json`. `config`: of the model, with GPT-2's names."""
    return {
        "folder": str(folder),
        "n_blocks": config["n_layer"],
        "width": config["n_embd"],
        "heads": config["n_head"],
        "vocab_size": config["vocab_size"],
        "max_length": config["n_positions"],
        "activation": config["activation_function"],
        "dtype": config["dtype"],
        "has_tokenizer": has_tokenizer,
    }
