"""The swarm that is disturbed: real processes, as `modelswarm up` runs them, with a proxy in front of every server.

Used by `__main__.py` and by the sample in `make test`. All that `faults.py` and `oracle.py` need to reach is here.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from chaos.schedule import LEASE_SECONDS
from support.chaos.gateways import MoreGateways, gateway_names
from support.chaos.proxy import HOST, Network
from support.eventually import eventually
from support.models.tiny_models import TOY_LENGTH
from support.processes.forked_process import fork_process
from support.processes.swarm import Running, local_settings, metrics, total

from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.local.run_folder import GATEWAY_JOB
from modelswarm.local.supervisor import JobChange
from modelswarm.local.swarm import LocalSwarm
from modelswarm.placement.plan import SwarmPlan
from modelswarm.placement.slots import Slot, slots_of
from modelswarm.protocol.wire import api_pb2_grpc
from modelswarm.resources.loading import parse_document

READY_SECONDS = 180.0
COMMENT_SECONDS = 1.0  # seconds between comments of a waiting stream
IDLE_SECONDS = 4.0  # unused named sessions are closed
RECONNECTS = tuple(  # short: the delay of reconnects is no property of the gateway
    (f"grpc.{which}_reconnect_backoff_ms", most)
    for which, most in (("initial", 100), ("min", 100), ("max", 500))
)
GATEWAY_HELD = "modelswarm_gateway_sessions"
_PORTS = range(20_000, 32_000)  # below the kernel's range for outgoing connections


@dataclass(frozen=True, slots=True)
class Plan:
    """The size and the capacity of the swarm."""

    model: str  # "hash" or "torch"
    seed: int
    spans: int = 2
    replicas: int = 2
    gateways: int = 1
    sessions: int = 8  # sessions of full length that fit on each server
    hold_seconds: float = 60.0


@dataclass(slots=True)
class World:
    plan: Plan
    running: Running
    network: Network
    pids: set[int]  # of every process that was started
    gateways: MoreGateways
    stubs: tuple[api_pb2_grpc.InferenceStub, ...]  # of each gateway

    @property
    def http_targets(self) -> tuple[str, ...]:
        """HTTP address of each gateway; none with one gateway, because no other could resume a stream."""
        if self.plan.gateways < 2:
            return ()
        more = [self.gateways.announced(name).http for name in self.gateways.names]
        return (self.running.local.http, *more)

    @property
    def gateway_names(self) -> tuple[str, ...]:
        return gateway_names(self.plan.gateways)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> bool:
        """Kill a server or a gateway. False: there was no such process just then, so nothing was done."""
        where = self.gateways if name in self.gateways.names else self.running.local
        return where.kill(name, number).pid != 0

    def gateway_metrics(self) -> dict[str, str]:
        """Return the metrics address of each gateway."""
        more = {name: self.gateways.announced(name).metrics for name in self.gateways.names}
        return {GATEWAY_JOB: self.running.local.metrics, **more}

    def gateway_sessions(self) -> dict[str, float]:
        """Return the number of sessions of each gateway that has any."""
        targets = self.gateway_metrics()
        found = {name: total(metrics(target), GATEWAY_HELD) for name, target in targets.items()}
        return {name: count for name, count in found.items() if count}

    @property
    def spans(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the servers of each span."""
        slots = self.running.local.slots
        return tuple(
            tuple(slot.name for slot in slots if slot.span_index == index)
            for index in range(self.plan.spans)
        )


@contextmanager
def world(folder: Path, plan: Plan) -> Iterator[World]:
    """Run a swarm that is ready at entry; no process is left at exit."""
    name = f"chaos-{plan.model}"
    swarm_plan = _plan_of(folder, name, plan)
    slots = slots_of(name, swarm_plan.spans, swarm_plan.replicas)
    network = Network(plan.seed)
    pids: set[int] = set()
    lock = threading.Lock()

    def changed(change: JobChange) -> None:
        with lock:
            pids.add(change.job.pid)

    try:
        settings = _settings(name, plan, network, slots)
        with LocalSwarm(swarm_plan, settings, changed, fork_process) as local:
            running = Running(local)
            names = gateway_names(plan.gateways)[1:]
            more = MoreGateways(names, local.logs.parent, settings.flags[GATEWAY_JOB], changed)
            try:
                more.start()
                eventually(
                    "the model is ready",
                    lambda: any(model.ready for model in running.view.fetch_snapshot().models),
                    READY_SECONDS,
                )
                running.wait_whole()
                with _stubs([local.grpc, *(more.announced(name).grpc for name in names)]) as stubs:
                    yield World(plan, running, network, pids, more, stubs)
            finally:
                more.stop()
                running.close()
            local.raise_if_failed()
    finally:
        network.close()


@contextmanager
def _stubs(targets: Sequence[str]) -> Iterator[tuple[api_pb2_grpc.InferenceStub, ...]]:
    with ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(target, options=RECONNECTS))
            for target in targets
        ]
        yield tuple(api_pb2_grpc.InferenceStub(channel) for channel in channels)


def _plan_of(folder: Path, name: str, plan: Plan) -> SwarmPlan:
    document = f"""
apiVersion: modelswarm.io/v1alpha1
kind: ModelSwarm
metadata: {{name: {name}}}
spec:
  model: {{source: "file://{folder}", servedName: toy}}
  spans: {{count: {plan.spans}}}
  replicas: {plan.replicas}
  sessions: {{maxLength: {TOY_LENGTH}, concurrent: {plan.sessions}, holdLimit: {plan.hold_seconds:g}s}}
"""
    return plan_document(parse_document(document, name))


def _settings(name: str, plan: Plan, network: Network, slots: tuple[Slot, ...]) -> LocalSettings:
    flags: dict[str, tuple[str, ...]] = {
        GATEWAY_JOB: (
            *("--session-idle", str(IDLE_SECONDS), "--lease", str(LEASE_SECONDS)),
            *("--keepalive", str(COMMENT_SECONDS)),
        ),
    }
    ports = _free_ports(len(slots))
    for slot, port in zip(slots, ports, strict=True):
        listens, proxied = f"{HOST}:{port}", network.proxy(slot.name, port)
        flags[slot.name] = ("--listen", listens, "--advertise", proxied)
    made = local_settings(
        name, hash_model=plan.model == "hash", lease=LEASE_SECONDS, token_budget=32
    )
    return replace(made, flags=flags)


def _free_ports(count: int) -> list[int]:
    """Return free ports: a server keeps its port over restarts, because the proxy dials it."""
    found: list[int] = []
    rng = random.Random(os.getpid())
    while len(found) < count:
        port = rng.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port not in found and probe.connect_ex((HOST, port)) != 0:
                found.append(port)
    return found
