"""`AutoDistributedModelForCausalLM` and the class of each family, named after that of transformers.

Reads config.json and generation_config.json of a folder or of the hub; no weights are loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar, get_args

from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.checkpoint.sources import resolve_config_files
from modelswarm.client.hf.blocks import Blocks
from modelswarm.client.hf.errors import ArgumentError, UnsupportedArgumentError
from modelswarm.client.hf.model import DistributedModelForCausalLM, Sampler
from modelswarm.client.sessions.connection import Connection

_CONFIG_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "token")
"""Arguments of transformers' from_pretrained that concern the two files."""
_REFUSED = {
    "initial_peers": "a swarm is found by its gateway; use gateway=",
    "dht_prefix": "a swarm is found by its gateway; use gateway= and served_name=",
    "torch_dtype": "the swarm's document decides the dtype",
    "dtype": "the swarm's document decides the dtype",
    "device_map": "the blocks are on the servers",
    "quantization_config": "the blocks are on the servers",
    "load_in_8bit": "the blocks are on the servers",
    "load_in_4bit": "the blocks are on the servers",
    "low_cpu_mem_usage": "no weights are loaded",
    "attn_implementation": "the blocks are on the servers",
    "trust_remote_code": "only the families of transformers are served",
    "tuning_mode": "soft prompts are not built",
    "pre_seq_len": "soft prompts are not built",
    "active_adapter": "adapters are not built",
}


class AutoDistributedModelForCausalLM:
    """Chooses the class of a model's family."""

    model_types: ClassVar[frozenset[str]] = frozenset(FAMILIES)

    def __init__(self) -> None:
        raise TypeError("use AutoDistributedModelForCausalLM.from_pretrained(model, gateway=...)")

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        gateway: str | None = None,
        served_name: str | None = None,
        sampling: Sampler = "servers",
        **options: Any,
    ) -> DistributedModelForCausalLM:
        """Return the model of a swarm.

        `model`: a folder, a name on the hub, or an address of a swarm's document (`hf://`, `file://`, `demo://`).
        `gateway`: its gRPC port, `host:port` or a URL; default: MODELSWARM_GATEWAY, else 127.0.0.1:8001.
        `served_name`: the name under which it is served; default: that of `model`, or the only one.
        `sampling`: "servers" draw tokens at full speed. "client" draws them here by torch's generator: `generate` gives
        the tokens that transformers gives with the same seed, and each one costs a round trip.
        `options`: `revision`, `token`, `cache_dir` and `local_files_only` of transformers.
        """
        return load_model(cls.model_types, model, gateway, served_name, sampling, options)


def find_class(name: str) -> Any:
    """Return the class of that name. Raise AttributeError for a family that is not served."""
    if name == AutoDistributedModelForCausalLM.__name__:
        return AutoDistributedModelForCausalLM
    types = class_names().get(name)
    if types is None:
        known = ", ".join(sorted(class_names()))
        raise AttributeError(f"modelswarm has no {name}; served families: {known}")
    return _family_class(name, types)


def class_names() -> dict[str, frozenset[str]]:
    """Return the name of each family's class, and the model types that it loads."""
    found: dict[str, frozenset[str]] = {}
    for model_type in FAMILIES:
        name = f"Distributed{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]}"
        found[name] = found.get(name, frozenset()) | {model_type}
    return found


@functools.cache
def _family_class(name: str, types: frozenset[str]) -> Any:
    def from_pretrained(
        cls: type[DistributedModelForCausalLM],
        /,
        model: str | Path,
        *,
        gateway: str | None = None,
        served_name: str | None = None,
        sampling: Sampler = "servers",
        **options: Any,
    ) -> DistributedModelForCausalLM:
        return load_model(types, model, gateway, served_name, sampling, options)

    from_pretrained.__doc__ = AutoDistributedModelForCausalLM.from_pretrained.__doc__
    members = {"from_pretrained": classmethod(from_pretrained), "__module__": __name__}
    return type(name, (DistributedModelForCausalLM,), members)


def load_model(
    types: frozenset[str],
    model: str | Path,
    gateway: str | None,
    served_name: str | None,
    sampling: Sampler,
    options: dict[str, Any],
) -> DistributedModelForCausalLM:
    """Read the model's two files, and return a model that asks the gateway."""
    for name in options:
        if name not in _CONFIG_ARGUMENTS:
            allowed = ", ".join(("gateway", "served_name", "sampling", *_CONFIG_ARGUMENTS))
            reason = _REFUSED.get(name, "it has no effect here")
            raise UnsupportedArgumentError(name, f"{reason}; allowed: {allowed}")
    if sampling not in get_args(Sampler):
        allowed = ", ".join(map(repr, get_args(Sampler)))
        raise ArgumentError("sampling", f"{sampling!r}; allowed: {allowed}")
    address = str(model)
    folder = str(resolve_config_files(address)) if "://" in address else address
    config = AutoConfig.from_pretrained(folder, **options)
    if config.model_type not in types:
        allowed = ", ".join(sorted(types))
        raise ArgumentError("model", f"model_type {config.model_type!r}; allowed here: {allowed}")
    connection = Connection(gateway)
    models = connection.list_models()
    served = choose_served_name(models, address, served_name, connection.target)
    name = f"Distributed{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]}"
    made: Any = find_class(name)(
        config,
        _generation_config(folder, config, options),
        connection,
        models[served],
        Blocks(connection, models[served], address, config, options),
        sampling,
    )
    loaded: DistributedModelForCausalLM = made.eval()
    return loaded


def choose_served_name(served: Collection[str], model: str, wanted: str | None, target: str) -> str:
    """Return the one of `served` that is meant. Raise ArgumentError if that is none, or not clear."""
    if wanted is not None:
        names = [wanted]
    else:
        last = model.rstrip("/").rsplit("/", 1)[-1].partition("@")[0]
        names = [model, last, *(served if len(served) == 1 else ())]
    for name in names:
        if name in served:
            return name
    found = ", ".join(served) or "none"
    detail = f"the gateway at {target} serves {found}"
    raise ArgumentError("served_name", f"{names[0]!r} is not served; {detail}")


def _generation_config(folder: str, config: Any, options: dict[str, Any]) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder, **options)
    except OSError:  # the model has no generation_config.json
        return GenerationConfig.from_model_config(config)
