"""The private swarm of a pipeline: servers and a gateway as child processes, from a model's address.

The children end with `LocalSwarm.stop`, and when this process ends in any other way. Sends no request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelswarm.client.integers import is_integer
from modelswarm.errors import UserError
from modelswarm.local.private_swarm import known_address, private_swarm

if TYPE_CHECKING:
    from modelswarm.local.swarm import LocalSwarm

SERVED_NAME = "pipeline"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")
_ARGUMENTS = {  # fields of a document, and the arguments that they are given by
    "model": "model_path",
    "spec.model.source": "model_path",
    "spec.model.dtype": "dtype",
    "spec.model.adapters": "adapters",
    "spec.model.maxLoraRank": "max_lora_rank",
    "spec.spans": "spans",
    "spec.spans.count": "spans",
    "spec.replicas": "replicas",
    "spec.sessions.maxLength": "session_len",
    "spec.sessions.concurrent": "max_batch_size",
    "--memory": "memory",
}


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """Options of a private swarm. Raises UserError, which names the argument."""

    spans: int | None = None  # None: as many as the memory needs
    replicas: int = 1  # servers per span; with 2 an answer survives the loss of any server
    session_len: int | None = None  # positions of a context; None: the model's
    sessions: int | None = None  # contexts that each server has room for; None: up to 512 MiB of KV
    dtype: str = "auto"
    memory: str | None = None  # of one server, such as 8Gi; None: no limit
    device: str = "cpu"
    threads: int | None = None  # per server; None: the CPUs of this process, divided
    adapters: Mapping[str, str] | None = None  # address of each LoRA adapter, by its name
    max_lora_rank: int | None = None  # of the adapters; None: 16

    def __post_init__(self) -> None:
        for name in ("spans", "replicas", "session_len", "sessions", "threads", "max_lora_rank"):
            value = getattr(self, name)
            if value is None and name != "replicas":
                continue
            if not is_integer(value) or value < 1:
                shown = "max_batch_size" if name == "sessions" else name
                raise UserError(shown, f"{value!r} is not allowed; allowed: a whole number from 1")
        if self.dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise UserError("dtype", f"{self.dtype!r} is not allowed; allowed: {allowed}")
        for name in ("memory", "device"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise UserError(name, f"{value!r} is not allowed; allowed: a string")
        if self.adapters is not None and not _has_texts(self.adapters):
            detail = "allowed: a mapping of names to folders of adapters"
            raise UserError("adapters", f"{self.adapters!r} is not allowed; {detail}")
        if self.max_lora_rank is not None and not self.adapters:
            raise UserError("max_lora_rank", "it has an effect only with adapters; leave it out")


def _has_texts(adapters: object) -> bool:
    return isinstance(adapters, Mapping) and all(
        isinstance(text, str) for pair in adapters.items() for text in pair
    )


def model_address(model: str, argument: str = "model_path") -> str:
    """Return the address of a folder, or of a name on the hub, as documents have it. UserError for any other text."""
    address = known_address(model)
    if address is not None:
        return address
    if not os.path.exists(os.path.expanduser(model)) and _HUB_NAME.fullmatch(model):
        return f"hf://{model}"
    others = {"model_path": ", demo://counting, or a gateway's URL such as http://127.0.0.1:8000"}
    detail = f"allowed: a folder, owner/name of a hub{others.get(argument, '')}"
    raise UserError(argument, f"{model!r} is no folder; {detail}")


def _adapter_address(adapter: str) -> str:
    """Return an adapter's address. UserError for a folder without its files; servers check what is in them."""
    from modelswarm.checkpoint.config.adapter_config import ADAPTER_FILES
    from modelswarm.checkpoint.sources import resolve_adapter

    address = model_address(adapter, "adapters")
    if address.startswith("file://"):
        folder = resolve_adapter(address)
        missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
        if missing:
            detail = f"allowed: a folder with {' and '.join(ADAPTER_FILES)}"
            raise UserError("adapters", f"{folder} has no {missing[0]}; {detail}")
    return address


def start_private_swarm(model: str, options: SwarmOptions) -> LocalSwarm:
    """Start the processes and wait until they serve. No process is left if that fails."""
    sessions = {"maxLength": options.session_len, "concurrent": options.sessions}
    spec = {
        "spans": {} if options.spans is None else {"count": options.spans},
        "replicas": options.replicas,
        "sessions": {name: value for name, value in sessions.items() if value is not None},
    }
    adapters = [
        {"name": name, "source": _adapter_address(source)}
        for name, source in (options.adapters or {}).items()
    ]
    served: dict[str, Any] = {
        "source": model_address(model),
        "dtype": options.dtype,
        "adapters": adapters,
    }
    if options.max_lora_rank is not None:
        served["maxLoraRank"] = options.max_lora_rank
    try:
        swarm = private_swarm(
            SERVED_NAME,
            served,
            spec,
            memory=options.memory,
            device=options.device,
            threads=options.threads,
        )
    except UserError as error:
        argument = _ARGUMENTS.get(error.field.partition("[")[0], error.field)
        if argument == "spans" and options.spans is None:
            argument = "memory"  # it decides the number of spans
        raise UserError(argument, error.message) from None
    swarm.start()
    return swarm
