"""The app of `modelswarm-server`: reads flags, loads the model, runs the node and returns an exit code.

Exit code 0 after a graceful stop. Exit code 2 if the server cannot start, 3 if it does not fit into its memory limit,
4 if its device is not usable. Then the last line on stderr is one sentence, which Kubernetes shows. A user's mistake
never prints a traceback. The probe server starts first, then the model is loaded, then others can connect. Called by
`__main__.py`; knows no protocol.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Never, cast

from modelswarm.checkpoint.facts import read_config, read_facts
from modelswarm.checkpoint.sources import resolve, resolve_adapter, resolve_config_files
from modelswarm.checkpoint.tokenizer import check_tokenizer
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.placement.memory import TRAINING_BYTES
from modelswarm.process.command_line import run_with_exit_code
from modelswarm.process.early_signals import exit_on_signals
from modelswarm.process.logs import start_log
from modelswarm.process.memory_limit import ROOT, read_memory_limit, read_resident_bytes
from modelswarm.process.parent_watch import exit_with_parent
from modelswarm.process.start_progress import ReportProgress, StartPhase, ignore_progress
from modelswarm.process.start_reporter import StartReporter
from modelswarm.protocol.identity import Adapter
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.model.hash_model import HashModel
from modelswarm_serving.runtime.liveness import Liveness
from modelswarm_serving.runtime.loaded_model import LoadedModel
from modelswarm_serving.runtime.memory_check import check_memory_limit
from modelswarm_serving.runtime.model_files import open_model_files
from modelswarm_serving.runtime.node import Node, error_text
from modelswarm_serving.runtime.probe_server import ProbeServer
from modelswarm_serving.settings import Settings, parse_settings

if TYPE_CHECKING:
    from modelswarm_serving.model.transformer.startup import SpanOptions

PROGRAM = "modelswarm-server"
NO_TORCH = "torch is not installed; images without it expect it mounted at /opt/torch"
_HASH_PAGES = 1024
_HASH_LENGTH = 4096
_HASH_ROW_BYTES = 8
_PROGRESS_BAR_VARIABLES = ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")


def main() -> Never:
    code = run(sys.argv[1:])
    logging.shutdown()
    # Everything is closed and written. An orderly exit would wait seconds for torch, and perhaps for a
    # step that still runs in its thread.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the server and return its exit code. An unexpected error is raised, with its traceback."""
    exit_on_signals()  # until the node handles signals itself
    return run_with_exit_code(
        PROGRAM, lambda: _serve(parse_settings(arguments)), name_flag=_flag_name
    )


def _serve(settings: Settings) -> int:
    start_log(settings.name)
    if settings.parent_fd is not None:
        exit_with_parent(settings.parent_fd)
    start = StartReporter(settings.start_file)
    liveness = Liveness(time.monotonic, start)
    probe_server = open_probe_server(settings, liveness)
    for name in _PROGRESS_BAR_VARIABLES:
        os.environ.setdefault(name, "1")  # progress bars would run into the last line on stderr
    loaded = load(settings, report=start.report)
    # Loaded objects stay for ever: a full garbage collection over them would stop every thread for 0.2 s.
    gc.collect()
    gc.freeze()
    node = Node(settings, loaded, liveness, probe_server)
    asyncio.run(node.run())
    return 0


def open_probe_server(settings: Settings, health: Liveness) -> ProbeServer | None:
    if settings.metrics is None:
        return None
    try:
        return ProbeServer(settings.metrics, health)
    except OSError as error:
        raise UserError(
            "--metrics", f"cannot listen on {settings.metrics}: {error_text(error)}"
        ) from error


def load(
    settings: Settings, root: Path = ROOT, report: ReportProgress = ignore_progress
) -> LoadedModel:
    """Load the model of these settings; UserError if it cannot be served.

    `root`: folder that has `proc` and `sys/fs/cgroup`. MemoryLimitError if the limit there is too small.
    """
    if settings.hash_model:
        return _load_hash(settings)
    assert settings.model is not None
    fetched = partial(report, StartPhase.FETCHING)
    checkpoint = resolve(settings.model, (settings.first, settings.last), on_bytes=fetched)
    config = read_facts(checkpoint.folder, (settings.first, settings.last)).config
    files = open_model_files(checkpoint.folder, settings.tokenizer, settings.chat_template)
    check_tokenizer(files.tokenizer_folder or checkpoint.folder, config.vocab)
    adapters = {name: resolve_adapter(source) for name, source in settings.adapters.items()}
    if find_spec("torch") is None:
        raise ModelSwarmError(NO_TORCH)
    # After all checks that need no torch, which takes seconds to import.
    report(StartPhase.IMPORTING, 0, 0)
    options = span_options(settings, files.tokenizer_folder)
    options = replace(options, adapters=adapters)
    from modelswarm_serving.model.transformer.startup import container_memory, load_span, plan_shape

    limit = read_memory_limit(root)
    options = replace(options, process=read_resident_bytes(root) or 0, host_limit=limit)
    first, last = settings.first, settings.last
    shape, facts = plan_shape(checkpoint.folder, first, last, options)
    memory = container_memory(facts, first, last, options)
    check_memory_limit(memory, shape, limit)
    training = settings.training_memory
    if training is None and not options.device.is_cpu:
        training = 0  # KV fills the device, where only the flag reserves memory for passes
    elif training is None:
        planned = memory.with_pages(shape.total_pages).total
        training = TRAINING_BYTES if limit is None else min(TRAINING_BYTES, limit - planned)
    span = load_span(checkpoint.folder, first, last, options, report)
    revision = checkpoint.revision + files.revision_suffix
    return LoadedModel(span, files, revision, span, training)


def span_options(settings: Settings, tokenizer: Path | None) -> SpanOptions:
    """Return the options of the span; `tokenizer`: folder of a tokenizer that replaces the model's."""
    from modelswarm_serving.model.device import TorchDrivers, find_device

    device = find_device(settings.device, TorchDrivers())
    if device.is_cpu:
        leave_out_triton()
    from modelswarm_serving.model.transformer.startup import SpanOptions

    return SpanOptions(
        device=device,
        memory_fraction=settings.memory_fraction,
        dtype=settings.dtype,
        threads=settings.threads,
        pages=settings.pages,
        memory=settings.memory,
        replay_memory=settings.replay_memory,
        training_memory=settings.training_memory or 0,
        max_lora_rank=settings.max_lora_rank,
        weight_layout=settings.weight_layout,
        attention_backend=settings.attention_backend,
        enforce_eager=settings.enforce_eager,
        page_size=settings.page_size,
        max_length=settings.max_length,
        token_budget=settings.token_budget,
        tokenizer=tokenizer,
    )


def leave_out_triton() -> None:
    """Let imports of Triton fail as on a machine without it. Nothing is compiled on a CPU, and it takes 67 MiB.

    transformers imports it on its way to models, through torch's compiler. Without effect once it is imported.
    """
    sys.modules.setdefault("triton", cast("ModuleType", None))


def _load_hash(settings: Settings) -> LoadedModel:
    n_blocks, vocab, length = settings.hash_blocks, settings.hash_vocab, _HASH_LENGTH
    folder = None
    if settings.model is not None:
        folder = resolve_config_files(settings.model)
        config = read_config(folder)
        n_blocks, vocab, length = config.n_blocks, config.vocab, config.context
    if settings.last > n_blocks:
        raise UserError(
            "blocks", f"{settings.first}:{settings.last} is out of range: there are 0:{n_blocks}"
        )
    shape = ModelShape(
        first=settings.first,
        last=settings.last,
        n_blocks=n_blocks,
        row_bytes=_HASH_ROW_BYTES,
        page_size=settings.page_size,
        total_pages=settings.pages or _HASH_PAGES,
        max_length=settings.max_length or length,
        vocab_size=vocab,
        hidden_bytes=_HASH_ROW_BYTES,
    )
    files = open_model_files(folder, settings.tokenizer, settings.chat_template)
    # The hash of a name stands for the weights of an adapter; its source is its revision.
    adapters = [Adapter(name, source) for name, source in settings.adapters.items()]
    revision = f"hash-{n_blocks}-{vocab}{files.revision_suffix}"
    return LoadedModel(HashModel(shape, adapters), files, revision)


def _flag_name(field: str) -> str:
    return field if field.startswith("--") else f"--{field.replace('_', '-')}"
