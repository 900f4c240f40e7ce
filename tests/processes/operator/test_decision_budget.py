"""A decision that takes too long is cancelled for its swarm only, while the event loop continues."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.eventually import eventually

from modelswarm.kube.client import KubeClient
from modelswarm_operator.controller.decision_budget import DecisionOverrunError, run_within
from modelswarm_operator.controller.executor import Executor
from modelswarm_operator.controller.worker import Workers
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.informer.resync import Resync
from modelswarm_operator.kube.events import EventRecorder
from modelswarm_operator.kube.resources import SWARM
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.state.actions import Decision, WriteStatus
from modelswarm_operator.reconcile.state.observed import Observed

Json = dict[str, Any]
BUDGET = 0.1  # CPU seconds
WAIT_SECONDS = 60.0


def spin_until(released: threading.Event) -> None:
    """Use CPU time until the event is set."""
    while not released.is_set():
        sum(range(1000))


async def until(what: str, condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, what, condition, WAIT_SECONDS)


async def test_result_and_error_of_a_quick_decision_are_its_own() -> None:
    def fail() -> None:
        raise ValueError("of the decision")

    assert await run_within(lambda: 7, BUDGET) == 7
    with pytest.raises(ValueError, match="of the decision"):
        await run_within(fail, BUDGET)


async def test_decision_past_its_budget_is_left_behind() -> None:
    released = threading.Event()
    try:
        with pytest.raises(DecisionOverrunError, match=r"0\.1 s of CPU time"):
            await run_within(lambda: spin_until(released), BUDGET)
    finally:
        released.set()


async def test_decision_that_waits_for_its_turn_is_within_budget() -> None:
    """Only CPU time counts, so a busy node cancels no decision."""

    def wait() -> str:
        time.sleep(5 * BUDGET)
        return "done"

    assert await run_within(wait, BUDGET) == "done"


class SwarmServer:
    """The part of an API server that status writes and Events need."""

    def __init__(self, *names: str) -> None:
        self.swarms = {name: _make_swarm(name) for name in names}

    async def respond(self, request: web.Request) -> web.Response:
        answer: Json = {}
        if request.method == "PUT":
            swarm = self.swarms[request.path.split("/")[-2]]
            swarm["status"] = (await request.json())["status"]
            answer = self.touch(swarm)
        return web.Response(text=json.dumps(answer), content_type="application/json")

    def touch(self, swarm: Json) -> Json:
        swarm["metadata"]["resourceVersion"] = str(int(swarm["metadata"]["resourceVersion"]) + 1)
        return swarm

    def degraded(self, name: str) -> tuple[str, str] | None:
        conditions = self.swarms[name]["status"].get("conditions", ())
        found = [(one["status"], one["reason"]) for one in conditions if one["type"] == "Degraded"]
        return found[0] if found else None


def _make_swarm(name: str) -> Json:
    meta = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1", "generation": 1}
    return {"metadata": meta, "spec": {"model": {"source": "demo://counting"}}, "status": {}}


@contextlib.asynccontextmanager
async def serve(server: SwarmServer, folder: Path) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    cluster = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "me", "user": {}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    client = KubeClient(folder / "kubeconfig", user_agent="test")
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


async def test_swarm_past_its_budget_stops_no_other_swarm(tmp_path: Path) -> None:
    server, released, decided = SwarmServer("slow", "quick"), threading.Event(), []

    def decide(observed: Observed, now: float) -> Decision:
        decided.append(observed.swarm.name)
        if observed.swarm.name == "slow":
            spin_until(released)
        if observed.swarm.status:
            return Decision((), None)
        return Decision((WriteStatus({"coverage": 1}),), None)

    cache, metrics = Cache(), Metrics()
    for swarm in server.swarms.values():
        cache.apply_event(SWARM, False, swarm)
    async with serve(server, tmp_path) as client:
        executor = Executor(
            client,
            cache,
            EventRecorder(client, "test"),
            metrics,
            lambda uids: workers.enqueue(uids),
        )
        resync = Resync(client, cache, metrics, ())
        workers = Workers(cache, executor, resync, decide, metrics, BUDGET)
        running = asyncio.create_task(workers.run())
        try:
            workers.enqueue(cache.uids())
            await until("the quick swarm", lambda: server.swarms["quick"]["status"])
            await until("the slow swarm", lambda: server.degraded("slow"))
            assert server.degraded("slow") == ("True", "DecisionTooLong")

            quick = decided.count("quick")
            workers.enqueue(cache.uids())
            await until("a second turn of the quick swarm", lambda: decided.count("quick") > quick)
            assert decided.count("slow") == 1, "the same spec is not tried again"

            slow = server.touch(server.swarms["slow"])
            slow["metadata"]["generation"] = 2
            workers.enqueue(cache.apply_event(SWARM, False, slow))
            await until("a turn for the new spec", lambda: decided.count("slow") == 2)
        finally:
            released.set()
            workers.stop()
            await running


async def test_only_events_have_a_queue_time(tmp_path: Path) -> None:
    server, turns = SwarmServer("timed"), 0

    def decide(observed: Observed, now: float) -> Decision:
        nonlocal turns
        turns += 1
        return Decision((), now)  # again at once, without an event

    cache, metrics = Cache(), Metrics()
    cache.apply_event(SWARM, False, server.swarms["timed"])
    async with serve(server, tmp_path) as client:
        executor = Executor(
            client, cache, EventRecorder(client, "test"), metrics, lambda uids: None
        )
        resync = Resync(client, cache, metrics, ())
        workers = Workers(cache, executor, resync, decide, metrics, BUDGET)
        running = asyncio.create_task(workers.run())
        workers.enqueue(cache.uids())
        await until("three turns", lambda: turns >= 3)
        workers.stop()
        await running
    name = "modelswarm_operator_queue_seconds_count"
    assert metrics.registry.get_sample_value(name) == 1
