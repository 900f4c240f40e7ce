"""Hugging Face's generate on a swarm: models without blocks, whose tokens come from the servers.

`from modelswarm import AutoDistributedModelForCausalLM`. Each family that is served has a class of its own, named after
that of transformers: `DistributedLlamaForCausalLM`, `DistributedBloomForCausalLM`, and so on. torch and transformers
are imported when a class is used for the first time.
"""

from __future__ import annotations

import re
from typing import Any

AUTO_CLASS = "AutoDistributedModelForCausalLM"
PREFIX = "Distributed"
_OPTIONS = f"its options are arguments of {AUTO_CLASS}.from_pretrained"
_BLOCKS = f"use {AUTO_CLASS}, whose blocks have their names in transformers, as model.model.layers"
_REFUSED = {
    r"(Auto)?Distributed\w*Config": _OPTIONS,
    r"(Auto)?Distributed\w*ForSequenceClassification": (
        f"use {AUTO_CLASS}, and train a head of your own on hidden states"
    ),
    r"(Auto)?Distributed\w*Speculative\w*": (
        f"use {AUTO_CLASS}, and give generate an assistant_model"
    ),
    r"(Auto)?Distributed\w*(?<!LMHead)Model": _BLOCKS,
    r"RemoteSequential": _BLOCKS,
    r"RemoteSequenceManager": f"the gateway chooses servers; use {AUTO_CLASS}",
}
"""Patterns of Petals' class names that have no class here -> what there is."""


def __getattr__(name: str) -> Any:
    """Return a class. Raise ImportError for others of Petals: `from` hides the sentence of an AttributeError."""
    for pattern, detail in _REFUSED.items():
        if re.fullmatch(pattern, name):
            raise ImportError(f"modelswarm has no {name}: {detail}")
    if name != AUTO_CLASS and not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from modelswarm.client.hf import auto

    return auto.find_class(name)
