"""The command lines of local servers and gateways: the numbers of a plan as flags.

Used by `LocalSwarm`. Knows flags; starts nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modelswarm.local.run_folder import GATEWAY_JOB, RunFolder
from modelswarm.placement.memory import MEMORY_FRACTION
from modelswarm.placement.plan import PAGE_SIZE, SwarmPlan
from modelswarm.placement.slots import Slot
from modelswarm.process.cpu_limit import usable_cpus
from modelswarm.protocol.identity import PeerId

GATEWAY_DRAIN_SECONDS = 2.0  # for running answers to end when a person stops the swarm


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Settings of a swarm on this machine that are not in its document."""

    http: str = "127.0.0.1:0"  # `host:port` of the first gateway; port 0: any free one
    grpc: str = "127.0.0.1:0"
    metrics: str = "127.0.0.1:0"
    admin: str = "127.0.0.1:0"
    gateways: int = 1  # the others get any free ports of the same hosts
    device: str = "cpu"  # of each server, as its flag takes it
    threads: int | None = 1  # per server; None: the CPUs of this process, divided among the servers
    lease: float | None = None  # seconds, for servers and gateways; None: the default
    hold_limit: float | None = None  # seconds, of the gateways; None: the document's
    tool_call_parser: str = ""  # of the gateways; empty: found by each model's chat template
    vllm_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    token_budget: int | None = None  # rows per step of a server; None: the server's default
    restart_limit: float = 30.0  # seconds; the longest wait before a process is started again
    hash_model: bool = False  # the exact test model instead of the transformer
    start_timeout: float = 180.0  # seconds without progress after which a start fails
    publish: bool = True  # `status`, `chat` and `generate` find the swarm
    run_name: str | None = None  # its folder's name, unique on this machine; None: the swarm's name
    flags: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of a slot's server, or of `gateway` for all gateways: these come last, so they win


def gateway_names(count: int) -> tuple[str, ...]:
    """Return the job names of `count` gateways: `gateway`, `gateway2`, `gateway3`."""
    return (GATEWAY_JOB, *(f"{GATEWAY_JOB}{number}" for number in range(2, count + 1)))


def server_command(
    plan: SwarmPlan,
    slot: Slot,
    settings: LocalSettings,
    folder: RunFolder,
    incarnation: int,
    parent_fd: int,
) -> list[str]:
    flags = {
        "--model": plan.source,
        "--served-name": plan.served_name,
        "--blocks": str(slot.span),
        "--listen": "127.0.0.1:0",
        "--discovery-dir": str(folder.members),
        "--name": slot.name,
        "--incarnation": str(incarnation),
        "--dtype": plan.dtype,
        "--device": settings.device,
        "--threads": str(threads_per_server(plan, settings)),
        **_room_flags(plan, slot, settings),
        "--page-size": str(PAGE_SIZE),
        "--max-length": str(plan.max_length),
        "--metrics": "127.0.0.1:0",
        "--start-file": str(folder.starts / f"{slot.name}.json"),
        "--parent-fd": str(parent_fd),
    }
    if plan.tokenizer is not None:
        flags["--tokenizer"] = plan.tokenizer
    if plan.chat_template is not None:
        flags["--chat-template"] = str(folder.chat_template)
    if settings.lease is not None:
        flags["--lease"] = str(settings.lease)
    if settings.token_budget is not None:
        flags["--token-budget"] = str(settings.token_budget)
    if plan.training_memory is not None:
        flags["--training-memory"] = str(plan.training_memory)
    if plan.adapters:
        flags["--max-lora-rank"] = str(plan.max_lora_rank)
    switches = ["--hash-model"] if settings.hash_model else []
    for each in plan.adapters:
        switches += ["--adapters", f"{each.name}={each.source}"]
    extra_flags = settings.flags.get(slot.name, ())
    return [*_python_module("modelswarm_serving"), *_flatten(flags), *switches, *extra_flags]


def _room_flags(plan: SwarmPlan, slot: Slot, settings: LocalSettings) -> dict[str, str]:
    """Return the number of pages, or the share of an accelerator that a server fills.

    All servers of the swarm compute on the same one.
    """
    on_device = settings.device not in ("auto", "cpu") and not settings.hash_model
    if plan.has_given_pages or not on_device:
        return {"--pages": str(plan.servers[slot.span_index].pages)}
    return {"--memory-fraction": f"{MEMORY_FRACTION / _server_count(plan):.4g}"}


def threads_per_server(plan: SwarmPlan, settings: LocalSettings) -> int:
    """Return the CPU threads of each server. More threads than CPUs wait for each other in every operation."""
    return settings.threads or max(1, usable_cpus() // max(1, _server_count(plan)))


def _server_count(plan: SwarmPlan) -> int:
    return plan.replicas * len(plan.servers)


def gateway_command(
    plan: SwarmPlan,
    settings: LocalSettings,
    folder: RunFolder,
    parent_fd: int,
    name: str = GATEWAY_JOB,
    replaces: Sequence[PeerId] = (),
) -> list[str]:
    """Return the command line. `replaces`: gateways of this swarm whose processes have ended."""
    hold = plan.hold_seconds if settings.hold_limit is None else settings.hold_limit
    flags = {
        "--discovery-dir": str(folder.members),
        "--http": settings.http,
        "--grpc": settings.grpc,
        "--metrics": settings.metrics,
        "--admin": settings.admin,
        "--name": name,
        "--run-file": str(folder.gateway_file(name)),
        "--hold-limit": str(hold),
        "--drain-timeout": str(GATEWAY_DRAIN_SECONDS),
        "--parent-fd": str(parent_fd),
    }
    if settings.lease is not None:
        flags["--lease"] = str(settings.lease)
    if settings.tool_call_parser:
        flags["--tool-call-parser"] = settings.tool_call_parser
    more = ["--vllm-metrics"] if settings.vllm_metrics else []
    more += [part for origin in settings.cors_origins for part in ("--cors-origin", origin)]
    more += [part for peer in replaces for part in ("--replaces", peer)]
    extra_flags = settings.flags.get(GATEWAY_JOB, ())
    return [*_python_module("modelswarm_gateway"), *_flatten(flags), *more, *extra_flags]


def child_environment(threads: int) -> dict[str, str]:
    """Return this process's environment, with libraries that start threads limited to `threads`."""
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        **os.environ,
        **dict.fromkeys(counts, str(threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def _python_module(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]  # -P: no imports from the current folder


def _flatten(flags: dict[str, str]) -> list[str]:
    return [part for flag in flags.items() for part in flag]
