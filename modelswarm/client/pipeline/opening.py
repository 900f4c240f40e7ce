"""`pipeline(model_path)`: opens a pipeline on a running gateway, or on a private swarm that it starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from modelswarm.client.answer_rows import AnswerRows
from modelswarm.client.api.async_client import AsyncClient
from modelswarm.client.api.loop_thread import LoopThread
from modelswarm.client.pipeline.engine import PipelineEngine
from modelswarm.client.pipeline.private_swarm import SwarmOptions, start_private_swarm
from modelswarm.client.pipeline.synchronous import Pipeline
from modelswarm.errors import UnavailableError, UserError
from modelswarm.local.private_swarm import missing_package

if TYPE_CHECKING:
    from modelswarm.local.swarm import LocalSwarm

MAX_BATCH_SIZE = 32  # prompts at a time
CONNECTIONS_PER_PROMPT = 2  # its answer, and the end of the one before
TIMEOUT_SECONDS = 600.0
_OF_GATEWAYS = ("model", "api_key")  # arguments without an effect on a private swarm
_OF_SWARMS = (
    *("spans", "replicas", "session_len", "dtype", "memory", "device", "threads"),
    *("adapters", "max_lora_rank"),
)
_REFUSED = {  # arguments of LMDeploy's pipeline
    "backend_config": "give its fields directly: session_len, max_batch_size, dtype, spans",
    "chat_template_config": "the model's own chat template is used; send messages with a system message",
    "speculative_config": "the servers choose by themselves how they speed up an answer",
    "trust_remote_code": "no code of a model is run",
    "log_level": "use the logger modelswarm of the module logging",
    "max_log_len": "prompts are not logged",
    "tp": "a model is split into spans of blocks; use spans",
    "download_dir": "set HF_HOME",
    "device_type": "use device",
    "cache_max_entry_count": "servers plan the memory of KV; use memory, of one server",
    "enable_prefix_caching": "only a session keeps its context; use pipe.session()",
    "quant_policy": "KV has the dtype of the weights",
    "model_format": "weights are float32, bfloat16 or float16; use dtype",
    "revision": "write it after the name: owner/name@revision",
}


class PipelineOptions(TypedDict, total=False):
    """The optional arguments of `pipeline`, which explains them."""

    max_batch_size: int | None
    timeout: float
    model: str | None
    api_key: str | None
    spans: int | None
    replicas: int | None
    session_len: int | None
    dtype: str | None
    memory: str | None
    device: str | None
    threads: int | None
    adapters: Mapping[str, str] | None
    max_lora_rank: int | None


def pipeline(
    model_path: str,
    *,
    max_batch_size: int | None = None,
    timeout: float = TIMEOUT_SECONDS,
    model: str | None = None,
    api_key: str | None = None,
    spans: int | None = None,
    replicas: int | None = None,
    session_len: int | None = None,
    dtype: str | None = None,
    memory: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    adapters: Mapping[str, str] | None = None,
    max_lora_rank: int | None = None,
    **others: Any,
) -> Pipeline:
    """Return a pipeline on a gateway at a URL, or on a private swarm of a model, which it stops at its end.

    `model_path`: a gateway's URL; or a folder of a model, owner/name of a hub, demo://counting.
    `max_batch_size`: prompts that run at a time, 32 by default. If it is given, each server of a private swarm gets
    room for so many contexts.
    `timeout`: seconds without an answer to any prompt, or without a byte of one, after which a prompt fails.

    Of a gateway:
    `model`: a served model, or an adapter of one; by default the first model. Of a private swarm: one of `adapters`.
    `api_key`: sent as a bearer token, for a proxy.

    Of a private swarm:
    `spans`: parts of the model, with a server each.
    `replicas`: servers per span. With 2 no loss of one server stops an answer.
    `session_len`: positions of a context; by default the model's.
    `dtype`: number format of weights; auto, float32, bfloat16 or float16.
    `memory`: of one server, such as 8Gi.
    `device`, `threads`: of each server.
    `adapters`: folder, or owner/name of a hub, of each LoRA adapter, by the name that requests have.
    `max_lora_rank`: largest rank of an adapter, 16 by default; memory is planned for it.

    UserError names a bad argument. UnreachableError: no gateway answers. UnavailableError: it serves no model.
    """
    _refuse(others)
    if not isinstance(model_path, str):
        raise UserError("model_path", f"{model_path!r} is not allowed; allowed: a string")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not timeout > 0:
        raise UserError("timeout", f"{timeout!r} is not allowed; allowed: seconds above 0")
    options = SwarmOptions(
        spans=spans,
        replicas=1 if replicas is None else replicas,
        session_len=session_len,
        sessions=max_batch_size,
        dtype="auto" if dtype is None else dtype,
        memory=memory,
        device="cpu" if device is None else device,
        threads=threads,
        adapters=adapters,
        max_lora_rank=max_lora_rank,
    )
    most = max_batch_size or MAX_BATCH_SIZE
    if model_path.startswith(("http://", "https://")):
        local = (
            *(spans, replicas, session_len, dtype, memory, device, threads),
            *(adapters, max_lora_rank),
        )
        for name, value in zip(_OF_SWARMS, local, strict=True):
            if value is not None:
                raise UserError(name, "the swarm of the gateway decides it; leave it out")
        return _connect(model_path, model, api_key, most, timeout, None)
    for name, value in zip(_OF_GATEWAYS, (model, api_key), strict=True):
        if value is not None and (name != "model" or model not in (adapters or {})):
            raise UserError(name, "it has an effect only with a gateway's URL; leave it out")
    package = missing_package()
    if package is not None:
        detail = f"{package} is not installed; pip install 'modelswarm[serving,gateway]'"
        raise UserError("model_path", f"a private swarm needs servers, and {detail}")
    swarm = start_private_swarm(model_path, options)
    try:
        return _connect(f"http://{swarm.http}", model, None, most, timeout, swarm)
    except BaseException:
        swarm.stop()
        raise


def _connect(
    url: str,
    model: str | None,
    api_key: str | None,
    most: int,
    timeout: float,
    swarm: LocalSwarm | None,
) -> Pipeline:
    client = AsyncClient(  # checks the URL and the key before a thread starts
        url,
        api_key=api_key,
        timeout=timeout,
        max_retries=0,  # the engine repeats what was refused
        max_connections=CONNECTIONS_PER_PROMPT * most + 1,
    )
    loop = LoopThread("pipeline")
    try:
        engine = loop.call(_open_engine(client, model, most, timeout, url))
    except BaseException:
        loop.call(client.aclose())
        loop.close()
        raise
    return Pipeline(loop, engine, swarm)


async def _open_engine(
    client: AsyncClient, model: str | None, most: int, timeout: float, url: str
) -> PipelineEngine:
    served = await client.models()
    if not served:
        raise UnavailableError(f"the gateway at {url} serves no model yet; try again")
    for each in served:
        if model in (None, each.name):
            return PipelineEngine(client, each, most, timeout, AnswerRows(url))
    known = ", ".join(each.name for each in served)
    raise UserError("model", f"{model!r} is not served at {url}; allowed: {known}")


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in _REFUSED and value is None:
            continue
        if name in _REFUSED:
            raise UserError(name, f"{_REFUSED[name]}; allowed: None")
        names = ("max_batch_size", "timeout", *_OF_GATEWAYS, *_OF_SWARMS)
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; allowed: {', '.join(names)}"
        raise UserError(name, f"unknown argument of pipeline{hint}")
