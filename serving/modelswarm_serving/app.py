"""`modelswarm-server`: flags in, a serving process, an exit code out.

0 after a graceful stop, 2 with one sentence when it cannot start; it never prints a traceback for
what a user can mend. Its last line on stderr is that sentence: Kubernetes shows it. The page of
probes and metrics is open first, then the model is loaded, then others can connect.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Never

from modelswarm.checkpoint.facts import read_outline
from modelswarm.checkpoint.sources import resolve, resolve_outline
from modelswarm.checkpoint.tokenizer import check_tokenizer
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.process.command_line import run_with_exit_code
from modelswarm.process.early_signals import exit_on_signals
from modelswarm.process.parent_watch import exit_with_parent
from modelswarm_serving.model.base import Model, ModelShape
from modelswarm_serving.model.hash_model import HashModel
from modelswarm_serving.runtime.liveness import Liveness
from modelswarm_serving.runtime.model_files import ModelFiles, open_model_files
from modelswarm_serving.runtime.node import Node, error_text
from modelswarm_serving.runtime.probe_server import ProbeServer
from modelswarm_serving.settings import Settings, parse

if TYPE_CHECKING:
    from modelswarm_serving.model.transformer.startup import SpanOptions

PROGRAM = "modelswarm-server"
NO_TORCH = "torch is not installed; images without it expect it mounted at /opt/torch"
_HASH_PAGES = 1024
_HASH_LENGTH = 4096
_ROW_OF_HASH = 8  # bytes
_PROGRESS_BAR_VARIABLES = ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    files: ModelFiles  # that gateways may ask for
    revision: str


def main() -> Never:
    code = run(sys.argv[1:])
    logging.shutdown()
    # Everything is closed and written. Taking torch apart would take seconds, and a step may still
    # run in its thread: nobody waits for either.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code. Whatever is not expected leaves as an exception, with its traceback."""
    exit_on_signals()  # until the node has its own way to stop
    return run_with_exit_code(PROGRAM, lambda: _serve(parse(arguments)), name_flag=_flag_name)


def _serve(settings: Settings) -> int:
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {settings.name} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    if settings.parent_fd is not None:
        exit_with_parent(settings.parent_fd)
    liveness = Liveness(time.monotonic)
    probe_server = open_probe_server(settings, liveness)
    for name in _PROGRESS_BAR_VARIABLES:
        os.environ.setdefault(name, "1")  # what libraries draw would run into our last words
    loaded = load(settings)
    # What was loaded stays: a full collection over it would stop every thread for 0.2 s.
    gc.collect()
    gc.freeze()
    node = Node(settings, loaded.model, loaded.files, loaded.revision, liveness, probe_server)
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


def load(settings: Settings) -> LoadedModel:
    """The model these settings ask for; UserError when there is none."""
    if settings.hash_model:
        return _load_hash(settings)
    assert settings.model is not None
    checkpoint = resolve(settings.model, (settings.first, settings.last))
    outline = read_outline(checkpoint.folder)
    outline.part(settings.first, settings.last)
    files = open_model_files(checkpoint.folder, settings.tokenizer, settings.chat_template)
    check_tokenizer(files.tokenizer_folder or checkpoint.folder, outline.vocab)
    if find_spec("torch") is None:
        raise ModelSwarmError(NO_TORCH)
    # After what can be refused without torch, which takes seconds to import.
    from modelswarm_serving.model.transformer.startup import load_span

    options = span_options(settings, files.tokenizer_folder)
    span = load_span(checkpoint.folder, settings.first, settings.last, options)
    return LoadedModel(span, files, checkpoint.revision + files.revision_suffix)


def span_options(settings: Settings, words: Path | None) -> SpanOptions:
    """What the span is to be told; `words`: folder of another tokenizer than the model's."""
    from modelswarm_serving.model.transformer.startup import SpanOptions

    return SpanOptions(
        dtype=settings.dtype,
        threads=settings.threads,
        pages=settings.pages,
        memory=settings.memory,
        replay_memory=settings.replay_memory,
        page_size=settings.page_size,
        max_length=settings.max_length,
        tokenizer=words,
    )


def _load_hash(settings: Settings) -> LoadedModel:
    n_blocks, vocab, length = settings.hash_blocks, settings.hash_vocab, _HASH_LENGTH
    folder = None
    if settings.model is not None:
        folder = resolve_outline(settings.model)
        outline = read_outline(folder)
        n_blocks, vocab, length = outline.n_blocks, outline.vocab, outline.context
    if settings.last > n_blocks:
        raise UserError(
            "blocks", f"{settings.first}:{settings.last} is out of range: there are 0:{n_blocks}"
        )
    shape = ModelShape(
        first=settings.first,
        last=settings.last,
        n_blocks=n_blocks,
        row_bytes=_ROW_OF_HASH,
        page_size=settings.page_size,
        total_pages=settings.pages or _HASH_PAGES,
        max_length=settings.max_length or length,
        vocab_size=vocab,
    )
    files = open_model_files(folder, settings.tokenizer, settings.chat_template)
    return LoadedModel(HashModel(shape), files, f"hash-{n_blocks}-{vocab}{files.revision_suffix}")


def _flag_name(field: str) -> str:
    return field if field.startswith("--") else f"--{field.replace('_', '-')}"
