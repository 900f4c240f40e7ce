"""Settings of a server process: one frozen object, made from the command line.

The only reader of flags in this process; nothing reads the environment. Made by `app.py`, which passes it on. Knows no
model: values that depend on the model are checked where it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from modelswarm.checkpoint.facts import DTYPES
from modelswarm.errors import UserError
from modelswarm.placement.memory import (
    MEMORY_FRACTION,
    TOKEN_BUDGET,
    TRAINING_BYTES,
)
from modelswarm.placement.quantity import bytes_of, human_bytes
from modelswarm.process.command_line import Seconds, device, read_flags, split_target, threads
from modelswarm.protocol.heartbeat import MAX_LEASE_SECONDS, MIN_LEASE_SECONDS
from modelswarm.protocol.link.hello_checks import MAX_ADAPTERS, MODEL, ZONE
from modelswarm.resources.spec import MAX_LORA_RANK
from modelswarm_serving.model.attention import backend_names
from modelswarm_serving.model.linear.layouts import AUTO, CHOICES


@dataclass(frozen=True, slots=True)
class Settings:
    model: str | None  # source; None only with the hash model
    tokenizer: str | None  # source, instead of the model's own
    chat_template: Path | None  # instead of the model's or the tokenizer's own
    served_name: str
    first: int
    last: int
    listen: str
    advertise: str  # address for others; "": the address where it listens
    discovery_dir: Path | None
    name: str
    incarnation: int
    metrics: str | None
    parent_fd: int | None
    start_file: Path | None  # gets the progress of the start
    dtype: str
    device: str
    memory_fraction: float | None  # of an accelerator
    threads: int | None  # None: as many as this process has CPUs
    pages: int | None
    memory: int | None  # bytes
    page_size: int
    max_length: int | None
    token_budget: int  # rows
    replay_memory: (
        int | None
    )  # bytes of the replay log; None: a row for every position of the pages
    training_memory: int | None  # bytes of forward and backward passes; None: what is left
    weight_layout: str
    attention_backend: str
    enforce_eager: bool
    adapters: Mapping[str, str]  # name -> source
    max_lora_rank: int
    lease_seconds: float
    drain_timeout_seconds: float
    heartbeat_seconds: float
    hold_limit_seconds: float | None  # stated in Hello; None: gateways decide
    zone: str  # failure domain; "": unknown
    hash_model: bool
    hash_blocks: int
    hash_vocab: int


_POSITIVE = click.IntRange(min=1)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?")
_ANY_HOST = ("0.0.0.0", "::", "[::]")

_OPTIONS: list[click.Parameter] = [
    click.Option(["--model"], help="Address of the model: demo://NAME, file://FOLDER or "
                 "hf://ORG/NAME."),
    click.Option(["--tokenizer"], help="Address of the tokenizer files and their chat template, like "
                 "--model's. Default: the model's own."),
    click.Option(["--chat-template"], type=click.Path(path_type=Path), help="File with a Jinja "
                 "chat template instead of the model's own."),
    click.Option(["--served-name"], help="Model name for clients; default: the last part of its source."),
    click.Option(["--blocks"], required=True, help="Blocks to hold, as FIRST:LAST, LAST excluded."),
    click.Option(["--listen"], default="127.0.0.1:0", show_default=True, help="HOST:PORT for links."),
    click.Option(["--advertise"], help="HOST:PORT at which gateways and other servers dial this server. "
                 "Default: --listen."),
    click.Option(["--discovery-dir"], type=click.Path(path_type=Path), help="Discovery folder, into "
                 "which a ready server writes NAME.json. Default: none; gateways discover the server by its pod."),
    click.Option(["--name"], required=True, help="Name of this server, unique in the discovery folder."),
    click.Option(["--incarnation"], type=click.IntRange(min=0), default=1, show_default=True,
                 help="Number that grows with each new server process or pod of this name."),
    click.Option(["--metrics"], help="HOST:PORT of /metrics, /live and /ready. Default: no such port."),
    click.Option(["--parent-fd"], type=click.IntRange(min=0), help="Read end of a pipe that the "
                 "parent process holds open; this process exits when the parent has exited."),
    click.Option(["--start-file"], type=click.Path(path_type=Path), help="File that gets the progress of the start "
                 "as JSON: phase, bytes of weights, reason. Default: none; /ready of --metrics has the same."),
    click.Option(["--dtype"], type=click.Choice(list(DTYPES)), default="float32",
                 show_default=True, help="Number format of weights and KV."),
    click.Option(["--device"], type=device, default="auto", show_default=True, help="Device that computes: cpu, "
                 "accelerator (of any kind), a kind such as cuda, or one such as cuda:1. auto: an accelerator if any."),
    click.Option(["--memory-fraction"], type=click.FloatRange(0, 1, min_open=True), help="Share of an accelerator's "
                 f"memory to take. Default: {MEMORY_FRACTION}; less leaves the rest to other servers."),
    click.Option(["--threads"], type=threads, default="auto", show_default=True, help="CPU threads of torch; "
                 "auto: the container's CPU limit rounded down, without a limit the CPUs of this process."),
    click.Option(["--weight-layout"], type=click.Choice(CHOICES), default=AUTO, show_default=True,
                 help="Layout of weights on a CPU. auto: the fastest, as measured at start."),
    click.Option(["--attention-backend"], type=click.Choice(backend_names.BACKENDS),
                 default=backend_names.AUTO, show_default=True, help="Attention over the pages. auto: triton on CUDA "
                 "if it works at start, else sdpa."),
    click.Option(["--enforce-eager"], is_flag=True, help="Capture no decode steps in CUDA graphs. Default: "
                 "those over triton are captured, if that works at start."),
    click.Option(["--pages"], type=_POSITIVE, help="Number of KV pages."),
    click.Option(["--memory"], help="Memory of the whole server, such as 2Gi, instead of --pages. KV gets what the "
                 "process, weights, activations, retained rows and a margin leave."),
    click.Option(["--page-size"], type=_POSITIVE, default=16, show_default=True, help="Positions of one KV page."),
    click.Option(["--max-length"], type=_POSITIVE, help="Maximum positions of a session."),
    click.Option(["--token-budget"], type=_POSITIVE, default=TOKEN_BUDGET, show_default=True,
                 help="Maximum rows of one step; longer prompts are split."),
    click.Option(["--replay-memory"], help="Host memory of the replay log: rows retained until their session ends, so "
                 "that a lost neighbour can be rebuilt. 0: no replay log. Default: enough for a row of every position "
                 "of the pages."),
    click.Option(["--training-memory"], help="Memory of forward and backward passes of training clients. 0: none are "
                 f"run. Default: {human_bytes(TRAINING_BYTES)}, or what the container's limit leaves if that is less; "
                 "0 on an accelerator."),
    click.Option(["--adapters"], multiple=True, metavar="NAME=SOURCE", help="LoRA adapter in peft's format, and the "
                 "name by which clients ask for it. SOURCE is a folder or like --model's. May be repeated."),
    click.Option(["--max-lora-rank"], type=click.IntRange(1, 512), default=MAX_LORA_RANK, show_default=True,
                 help="Largest rank of an adapter; memory is counted for this rank."),
    click.Option(["--lease", "lease_seconds"],
                 type=Seconds(min=MIN_LEASE_SECONDS, max=MAX_LEASE_SECONDS),
                 default=30.0, show_default=True,
                 help="Seconds that a session outlives its gateway's link. Use the value of the "
                 "gateways' --lease; if they differ, the longer one counts, up to 4 x this one."),
    click.Option(["--hold-limit", "hold_limit_seconds"], type=Seconds(min=0, min_open=True, max=86400),
                 help="Seconds that gateways may hold a session without a route. Default: the gateway's --hold-limit."),
    click.Option(["--drain-timeout", "drain_timeout_seconds"], type=Seconds(min=0, max=86400), default=25.0,
                 show_default=True, help="Seconds for migrating sessions after SIGTERM."),
    click.Option(["--heartbeat", "heartbeat_seconds"], type=Seconds(min=0.1, max=5), default=0.1,
                 show_default=True, help="Seconds between heartbeats to gateways whose sessions run here; "
                 "a gateway whose --suspect-after is less than two of these uses three of them."),
    click.Option(["--zone"], default="", help="Failure domain, such as the zone of the node. Gateways recover "
                 "sessions in another zone."),
    click.Option(["--hash-model"], is_flag=True, help="Run a hash function as the model, for tests."),
    click.Option(["--hash-blocks"], type=_POSITIVE, default=8, help="Number of blocks of the hash model, "
                 "without --model."),
    click.Option(["--hash-vocab"], type=click.IntRange(min=2), default=256,
                 help="Vocabulary of the hash model, without --model."),
]  # fmt: skip


def parse_settings(arguments: Sequence[str]) -> Settings:
    command = click.Command(
        "modelswarm-server",
        params=_OPTIONS,
        callback=_build_settings,
        help="Hold some blocks of a model and serve them to a swarm.",
    )
    return read_flags(command, Settings, arguments)


def _build_settings(
    blocks: str,
    memory: str | None,
    replay_memory: str | None,
    training_memory: str | None,
    served_name: str | None,
    advertise: str | None,
    adapters: tuple[str, ...],
    **values: Any,
) -> Settings:
    first, last = _blocks(blocks)
    if not _NAME.fullmatch(values["name"]):
        raise UserError("--name", "allowed are letters, digits, '.', '_' and '-'")
    if values["model"] is None and not values["hash_model"]:
        raise UserError("--model", "is needed, as demo://NAME, file://FOLDER or hf://ORG/NAME")
    if values["pages"] is not None and memory is not None:
        raise UserError("--pages", "give either --pages or --memory, not both")
    served = served_name or (values["model"] or "hash").rstrip("/").rsplit("/", 1)[-1]
    if not MODEL.fullmatch(served):
        allowed = "letters, digits and . _ / : - @, a letter or digit first, at most 128"
        raise UserError("--served-name", f"{served!r} is not a served name; allowed: {allowed}")
    if not ZONE.fullmatch(values["zone"]):
        raise UserError("--zone", "allowed are at most 63 letters, digits, '.', '_' and '-'")
    for name in ("listen", "metrics"):
        if values[name] is not None:
            split_target(f"--{name}", values[name], example="127.0.0.1:8100")
    return Settings(
        first=first,
        last=last,
        advertise=_advertised(values["listen"], advertise),
        memory=None if memory is None else bytes_of(memory, "--memory"),
        replay_memory=_bytes("--replay-memory", replay_memory),
        training_memory=_bytes("--training-memory", training_memory),
        served_name=served,
        adapters=_adapters(adapters, served),
        **values,
    )


def _adapters(given: Sequence[str], served_name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not (name and equals and source and MODEL.fullmatch(name)):
            raise UserError("--adapters", f"{text!r} is not NAME=SOURCE, like law=hf://ORG/NAME")
        if name in found or name == served_name:
            raise UserError(
                "--adapters", f"{name!r} is the name of another adapter or of the model"
            )
        found[name] = source
    if len(found) > MAX_ADAPTERS:
        raise UserError("--adapters", f"{len(found)} adapters; allowed: at most {MAX_ADAPTERS}")
    return found


def _bytes(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    return 0 if text == "0" else bytes_of(text, flag)


def _blocks(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise UserError("--blocks", f"{text!r} is not FIRST:LAST with FIRST below LAST, like 0:4")
    return int(match[1]), int(match[2])


def _advertised(listen: str, advertise: str | None) -> str:
    if advertise is None:
        if listen.rpartition(":")[0] in _ANY_HOST:
            raise UserError(
                "--advertise",
                f"is needed, because no other process can dial {listen}; like 10.0.0.7:7000",
            )
        return ""
    _, port = split_target("--advertise", advertise, example="10.0.0.7:7000")
    host = advertise.rpartition(":")[0]  # with its brackets
    if not _HOST.fullmatch(host) or host in _ANY_HOST or port == 0:
        raise UserError(
            "--advertise",
            f"no other process can dial {advertise!r}; allowed: HOST:PORT, like 10.0.0.7:7000",
        )
    return f"[{host}]:{port}" if ":" in host.strip("[]") and host[0] != "[" else advertise
