"""Hugging Face's generate on a swarm: models without blocks, whose tokens come from the servers.

`from modelswarm import AutoDistributedModelForCausalLM`. Each family that is served has a class of its own, named after
that of transformers: `DistributedLlamaForCausalLM`, `DistributedBloomForCausalLM`, and so on. torch and transformers
are imported when a class is used for the first time.
"""

from __future__ import annotations

from typing import Any

AUTO_CLASS = "AutoDistributedModelForCausalLM"
PREFIX = "Distributed"


def __getattr__(name: str) -> Any:
    if name != AUTO_CLASS and not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from modelswarm.client.hf import auto

    return auto.find_class(name)
