"""`AutoDistributedModelForCausalLM` and the class of each family, named after that of transformers.

Reads config.json and generation_config.json of a folder or of the hub; no weights are loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.checkpoint.sources import resolve_config_files
from modelswarm.client.hf.blocks import Blocks
from modelswarm.client.hf.errors import ArgumentError, UnsupportedArgumentError
from modelswarm.client.hf.model import DistributedModelForCausalLM, Sampler
from modelswarm.client.integers import is_integer
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.training.prompts import SoftPrompts, TuningMode
from modelswarm.errors import ModelSourceError

_CONFIG_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "token")
"""Arguments of transformers' from_pretrained that concern the two files."""
_CHOICE = "the gateway chooses servers; `modelswarm drain` takes one out of use"
_RECOVERY = "the gateway replaces lost servers; `--hold-limit` of `modelswarm up` is its timeout"
_LIST = "the gateway keeps the list of servers"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_OWN_ARGUMENTS = ("gateway", "served_name", "sampling", "tuning_mode", "pre_seq_len")
_REFUSED = {
    "initial_peers": "a swarm is found by its gateway; use gateway=",
    "dht_prefix": "a swarm is found by its gateway; use gateway= and served_name=",
    "daemon_startup_timeout": "the client starts no daemon; use gateway=",
    "allowed_servers": _CHOICE,
    "blocked_servers": _CHOICE,
    "connect_timeout": _RECOVERY,
    "request_timeout": _RECOVERY,
    "max_retries": _RECOVERY,
    "min_backoff": _RECOVERY,
    "max_backoff": _RECOVERY,
    "ban_timeout": _RECOVERY,
    "update_period": _LIST,
    "max_pinged": _LIST,
    "ping_timeout": _LIST,
    "show_route": "`modelswarm status` and `modelswarm ui` show the route of each session",
    "use_server_to_server": "servers always pass rows to the next one",
    "compression": "rows travel in the servers' dtype, without loss",
    "use_chunked_forward": "the head is on the servers",
    "quant_type": "the swarm's document decides the dtype",
    "use_auth_token": "use token=",
    "torch_dtype": "the swarm's document decides the dtype",
    "dtype": "the swarm's document decides the dtype",
    "device_map": "the blocks are on the servers",
    "quantization_config": "the blocks are on the servers",
    "load_in_8bit": "the blocks are on the servers",
    "load_in_4bit": "the blocks are on the servers",
    "low_cpu_mem_usage": "no weights are loaded",
    "attn_implementation": "the blocks are on the servers",
    "trust_remote_code": "only the families of transformers are served",
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
        tuning_mode: TuningMode | None = None,
        pre_seq_len: int | None = None,
        **options: Any,
    ) -> DistributedModelForCausalLM:
        """Return the model of a swarm.

        `model`: a folder, a name on the hub, or an address of a swarm's document (`hf://`, `file://`, `demo://`).
        `gateway`: its gRPC port, `host:port` or a URL; default: MODELSWARM_GATEWAY, else 127.0.0.1:8001.
        `served_name`: the name under which it is served; default: that of `model`, or the only one.
        `sampling`: "servers" draw tokens at full speed. "client" draws them here by torch's generator: `generate` gives
        the tokens that transformers gives with the same seed, and each one costs a round trip.
        `tuning_mode`: "ptune" trains `pre_seq_len` rows before the tokens of every input, and "deep_ptune" also rows of
        every block. The model itself is frozen.
        `options`: `active_adapter`, the name of a LoRA adapter of the swarm that everything runs with; `revision`,
        `token`, `cache_dir` and `local_files_only` of transformers.
        """
        tuning = Tuning.parse(tuning_mode, pre_seq_len)
        return load_model(cls.model_types, model, gateway, served_name, sampling, tuning, options)


class FamilyModel(DistributedModelForCausalLM):
    """A model of one family, whose class in transformers has the same name without `Distributed`."""

    model_types: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        gateway: str | None = None,
        served_name: str | None = None,
        sampling: Sampler = "servers",
        tuning_mode: TuningMode | None = None,
        pre_seq_len: int | None = None,
        **options: Any,
    ) -> Self:
        """Return the model of a swarm, as AutoDistributedModelForCausalLM does, if it is of this family."""
        tuning = Tuning.parse(tuning_mode, pre_seq_len)
        loaded = load_model(cls.model_types, model, gateway, served_name, sampling, tuning, options)
        assert isinstance(loaded, cls)
        return loaded


class DistributedBloomForCausalLM(FamilyModel):
    model_types = frozenset({"bloom"})


class DistributedCohere2ForCausalLM(FamilyModel):
    model_types = frozenset({"cohere2"})


class DistributedDeepseekV2ForCausalLM(FamilyModel):
    model_types = frozenset({"deepseek_v2"})


class DistributedDeepseekV3ForCausalLM(FamilyModel):
    model_types = frozenset({"deepseek_v3"})


class DistributedFalconForCausalLM(FamilyModel):
    model_types = frozenset({"falcon"})


class DistributedGPT2LMHeadModel(FamilyModel):
    model_types = frozenset({"gpt2"})


class DistributedGPTNeoXForCausalLM(FamilyModel):
    model_types = frozenset({"gpt_neox"})


class DistributedGemma2ForCausalLM(FamilyModel):
    model_types = frozenset({"gemma2"})


class DistributedGemma3ForCausalLM(FamilyModel):
    model_types = frozenset({"gemma3_text"})


class DistributedGemma3ForConditionalGeneration(FamilyModel):
    model_types = frozenset({"gemma3"})


class DistributedGlm4ForCausalLM(FamilyModel):
    model_types = frozenset({"glm4"})


class DistributedGptOssForCausalLM(FamilyModel):
    model_types = frozenset({"gpt_oss"})


class DistributedGraniteForCausalLM(FamilyModel):
    model_types = frozenset({"granite"})


class DistributedLlamaForCausalLM(FamilyModel):
    model_types = frozenset({"llama"})


class DistributedMistralForCausalLM(FamilyModel):
    model_types = frozenset({"mistral"})


class DistributedMixtralForCausalLM(FamilyModel):
    model_types = frozenset({"mixtral"})


class DistributedOPTForCausalLM(FamilyModel):
    model_types = frozenset({"opt"})


class DistributedOlmo2ForCausalLM(FamilyModel):
    model_types = frozenset({"olmo2"})


class DistributedPhi3ForCausalLM(FamilyModel):
    model_types = frozenset({"phi3"})


class DistributedQwen2ForCausalLM(FamilyModel):
    model_types = frozenset({"qwen2"})


class DistributedQwen2MoeForCausalLM(FamilyModel):
    model_types = frozenset({"qwen2_moe"})


class DistributedQwen3ForCausalLM(FamilyModel):
    model_types = frozenset({"qwen3"})


class DistributedQwen3MoeForCausalLM(FamilyModel):
    model_types = frozenset({"qwen3_moe"})


class DistributedStarcoder2ForCausalLM(FamilyModel):
    model_types = frozenset({"starcoder2"})


def find_class(name: str) -> Any:
    """Return the class of that name. Raise ImportError for a family that is not served."""
    if name == AutoDistributedModelForCausalLM.__name__:
        return AutoDistributedModelForCausalLM
    families = family_classes()
    if name not in families:
        known = ", ".join(sorted(families))
        raise ImportError(f"modelswarm has no {name}; served families: {known}")
    return families[name]


def family_classes() -> dict[str, type[FamilyModel]]:
    """Return the class of each family by its name."""
    return {
        name: found
        for name, found in globals().items()
        if isinstance(found, type) and issubclass(found, FamilyModel) and found.model_types
    }


def load_model(
    types: frozenset[str],
    model: str | Path,
    gateway: str | None,
    served_name: str | None,
    sampling: Sampler,
    tuning: Tuning | None,
    options: dict[str, Any],
) -> DistributedModelForCausalLM:
    """Read the model's two files, and return a model that asks the gateway."""
    adapter = options.pop("active_adapter", None)
    for name in options:
        if name not in _CONFIG_ARGUMENTS:
            allowed = ", ".join((*_OWN_ARGUMENTS, "active_adapter", *_CONFIG_ARGUMENTS))
            reason = _REFUSED.get(name, "it has no effect here")
            raise UnsupportedArgumentError(name, f"{reason}; allowed: {allowed}")
    if sampling not in get_args(Sampler):
        allowed = ", ".join(map(repr, get_args(Sampler)))
        raise ArgumentError("sampling", f"{sampling!r}; allowed: {allowed}")
    address = _check_address(model)
    given = [name for name, value in options.items() if value not in (None, False)]
    if "://" in address and given:
        detail = (
            "an address has its revision, as hf://owner/name@v2; HF_HOME and HF_TOKEN say the rest"
        )
        raise UnsupportedArgumentError(given[0], f"{detail}; leave it out, or give owner/name")
    folder = str(resolve_config_files(address)) if "://" in address else address
    config = _read_config(folder, options)
    if config.model_type not in types:
        allowed = ", ".join(sorted(types))
        raise ArgumentError("model", f"model_type {config.model_type!r}; allowed here: {allowed}")
    connection = Connection(gateway)
    models = connection.list_models()
    plain = [name for name, each in models.items() if not each.parent or name == served_name]
    served = choose_served_name(plain, address, served_name, connection.target)
    if adapter is not None:
        served = _choose_adapter(models, served, adapter)
    _compare_config(config.get_text_config(), models[served])
    name = f"Distributed{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]}"
    made: Any = find_class(name)(
        config,
        _generation_config(folder, config, options),
        connection,
        models[served],
        Blocks(connection, models[served], address, config, options),
        sampling,
        None if tuning is None else tuning.make_prompts(config.get_text_config()),
    )
    loaded: DistributedModelForCausalLM = made.eval()
    return loaded


def _check_address(model: Any) -> str:
    """Return the model's address as a text. Raise ModelSourceError for what is neither folder nor name."""
    allowed = "allowed: a folder, owner/name of a hub, or an address such as demo://counting"
    if not isinstance(model, (str, Path)):
        raise ModelSourceError("model", f"a {type(model).__name__}; {allowed}")
    address = str(model)
    if "://" in address or os.path.isdir(address):
        return address
    if os.path.exists(address) or not _HUB_NAME.fullmatch(address):
        raise ModelSourceError("model", f"{address!r} is no folder; {allowed}")
    return address


def _read_config(folder: str, options: dict[str, Any]) -> Any:
    """Return the model's config.json as transformers reads it. Raise ModelSourceError if it cannot be read."""
    is_folder = Path(folder).is_dir()
    if is_folder and not (Path(folder) / "config.json").is_file():
        detail = "allowed: a folder in Hugging Face's format"
        raise ModelSourceError("model", f"{folder} has no config.json; {detail}")
    try:
        return AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        place = f"{folder}/config.json" if is_folder else folder
        raise ModelSourceError("model", f"{place} cannot be read: {reason}") from error


def _compare_config(config: Any, served: ServedModel) -> None:
    """Raise ArgumentError if the swarm is known to serve a model of other sizes."""
    sizes = {
        "vocab_size": served.vocab_size,
        "num_hidden_layers": served.n_blocks,
        "hidden_size": served.hidden_size,
    }
    for name, size in sizes.items():
        own = getattr(config, name)
        if size and own != size:
            detail = f"{name} is {own} in config.json, and {size} at the swarm's {served.name!r}"
            raise ArgumentError("model", f"{detail}; give the folder of the model that is served")


@dataclass(frozen=True, slots=True)
class Tuning:
    """The arguments of prompt tuning."""

    mode: TuningMode
    rows: int

    @staticmethod
    def parse(mode: Any, rows: Any) -> Tuning | None:
        """Return the tuning that is asked for; None: none. Raise ArgumentError for impossible values."""
        if mode is not None and mode not in get_args(TuningMode):
            allowed = ", ".join(map(repr, get_args(TuningMode)))
            raise ArgumentError("tuning_mode", f"{mode!r}; allowed: {allowed}")
        if mode is None and rows is not None:
            raise ArgumentError("pre_seq_len", f"{rows!r} without tuning_mode; give both")
        if mode is None:
            return None
        if not is_integer(rows) or rows < 1:
            detail = "allowed: an integer of at least 1, the rows of the soft prompt"
            raise ArgumentError("pre_seq_len", f"{rows!r}; {detail}")
        return Tuning(mode, rows)

    def make_prompts(self, config: Any) -> SoftPrompts:
        """Return new prompts for a model of this configuration. Raise ArgumentError if its context is too short."""
        context = getattr(config, "max_position_embeddings", None)
        if context and self.rows >= context:
            detail = f"the model's context has {context} positions"
            raise ArgumentError("pre_seq_len", f"{self.rows}; {detail}")
        deviation = float(getattr(config, "initializer_range", 0.02))
        blocks = config.num_hidden_layers
        return SoftPrompts(self.mode, self.rows, config.hidden_size, blocks, deviation)


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


def _choose_adapter(models: Mapping[str, ServedModel], model: str, adapter: str) -> str:
    """Return the name of a model's adapter. Raise ArgumentError if the swarm has no such one."""
    known = sorted(name for name, each in models.items() if each.parent == model)
    if adapter in known:
        return adapter
    allowed = ", ".join(map(repr, known)) or "none, the swarm lists no adapters"
    raise ArgumentError("active_adapter", f"{adapter!r} is not one of {model}; allowed: {allowed}")


def _generation_config(folder: str, config: Any, options: dict[str, Any]) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder, **options)
    except OSError:  # the model has no generation_config.json
        return GenerationConfig.from_model_config(config)
