"""The shell around `ServerCore`: event loop, links, engine thread.

Started by `app.py` with a loaded model. Everything runs on one event loop: messages of links go into the core, its
effects go to links and to the engine. A step is planned behind all reads of a pass of the loop, so that rows that
arrive together run together. Knows no rules of the protocol.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from modelswarm.errors import UserError
from modelswarm.placement.replay_memory import replay_bytes
from modelswarm.process.run_files import remove_run_file, write_run_file
from modelswarm.protocol.block_passes import PASS_METHOD
from modelswarm.protocol.heartbeat import BUSY_SECONDS, HeartbeatTimer
from modelswarm.protocol.identity import Address, PeerId, peer_id
from modelswarm.protocol.link.handshake import lease_fault
from modelswarm.protocol.link.links import Links
from modelswarm.protocol.messages import (
    Hello,
    Item,
    Lane,
    ModelFileRequest,
    Role,
    Send,
    reply_address,
)
from modelswarm_serving.core.server import GrammarRequest, ServerCore
from modelswarm_serving.core.settings import (
    TRANSFER_RATE,
    ServerSettings,
    pipeline_rows,
    row_window,
)
from modelswarm_serving.core.stall_estimator import SAMPLE_SECONDS
from modelswarm_serving.metrics import Metrics
from modelswarm_serving.model.base import NO_GRAMMARS, ModelShape
from modelswarm_serving.model.passes.contract import PART_ROWS
from modelswarm_serving.runtime.engine import (
    SHORT_STEP_SECONDS,
    Engine,
    PartDone,
    StepDone,
)
from modelswarm_serving.runtime.hello import ServerIdentity
from modelswarm_serving.runtime.liveness import Liveness
from modelswarm_serving.runtime.loaded_model import LoadedModel
from modelswarm_serving.runtime.model_files import file_chunks
from modelswarm_serving.runtime.passes.calls import PassCalls, PassServer
from modelswarm_serving.runtime.passes.schedule import PassSchedule
from modelswarm_serving.runtime.probe_server import ProbeServer
from modelswarm_serving.settings import Settings

log = logging.getLogger(__name__)

_MAX_FILE_REQUESTS = 256
"""Requests for model files that may wait."""
_TRANSFER_PAUSE_SECONDS = 0.002
"""Pause while only KV transfers wait and their rate is used up."""
_DRAIN_POLL_SECONDS = 0.05
"""Time between two looks for sessions that still need this server."""
_MAX_QUEUED_FILE_BYTES = 4 << 20
"""Bytes of a model file that may be queued for one gateway."""


class Node:
    def __init__(
        self,
        settings: Settings,
        loaded: LoadedModel,
        liveness: Liveness,
        probe_server: ProbeServer | None = None,
    ) -> None:
        model = loaded.model
        self._settings = settings
        self._model = model
        self._peer = peer_id(settings.name, settings.incarnation)
        core_settings = ServerSettings(
            Address(self._peer, ""),
            adapters=frozenset(model.adapters),
            lease_seconds=settings.lease_seconds,
            token_budget=settings.token_budget,
            pipeline_rows=pipeline_rows(row_window(model.shape.row_bytes)),
            row_window=row_window(model.shape.row_bytes),
            replay_bytes=replay_limit(settings, model.shape),
            transfer_rate=TRANSFER_RATE,
        )
        # One thread: compiling drops the interpreter's lock, and recoveries wait for nothing else here.
        self._grammar_compiler = ThreadPoolExecutor(1, "grammars")
        self._core = ServerCore(core_settings, model.shape, lambda: secrets.randbits(64))
        compute = model.compute
        self._identity = ServerIdentity(
            settings, self._peer, model.shape, loaded.revision, compute.numerics
        )
        self._files = loaded.files
        self._metrics = Metrics(settings.served_name, model.shape, compute)
        self._liveness, self._probe_server = liveness, probe_server
        if probe_server is not None:
            probe_server.registry = self._metrics.registry
        self._schedule = PassSchedule()
        server = PassServer(self._peer, settings.dtype, model.shape)
        self._passes = PassCalls(
            server,
            loaded.passes,
            loaded.training_memory,
            min(PART_ROWS, settings.token_budget),
            self._schedule,
            self._schedule_plan,
        )
        self._heartbeats = HeartbeatTimer.for_server(random.random, settings.heartbeat_seconds)
        self._plan_scheduled = False  # a step will be planned in the next pass of the loop
        self._step_running = False
        self._transfer_pause = False  # only KV transfers wait, for their rate
        self._file_requests: asyncio.Queue[tuple[PeerId, str]] = asyncio.Queue(_MAX_FILE_REQUESTS)
        self._draining = asyncio.Event()
        self._stop = asyncio.Event()
        self._failure: Exception | None = None  # it ends the process

    async def run(self) -> None:
        """Serve until a signal, and then until the sessions have migrated; UserError if the server cannot start."""
        self._loop = loop = asyncio.get_running_loop()
        self._clock: Callable[[], float] = loop.time
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        # Not measured on other devices, where a step is mostly a wait without the interpreter's lock.
        short = SHORT_STEP_SECONDS if self._model.compute.is_cpu else 0.0
        self._engine = Engine(self._model, self._on_step_done, self._on_part_done, short)
        grammar = await self._start_grammars()
        hello = self._identity.hello(self._core.max_session_length, grammar, self._model.adapters)
        self._links = Links(hello, self)
        target = await self._listen(self._settings.listen)
        self._announce(target)
        self._liveness.mark_ready()
        log.info("%s serves at %s", self._peer, target)
        work = (
            self._tick(),
            self._sample_stalls(),
            self._send_files(),
            self._drain(),
            self._stop.wait(),
        )
        tasks = [loop.create_task(each) for each in work]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # a task ends only by an internal error, which ends the process
            if self._failure is not None:
                raise self._failure
        finally:
            self._withdraw()
            for task in tasks:
                task.cancel()
            await self._links.close()

    async def _start_grammars(self) -> str:
        """Build what all grammars need, before gateways come: it holds the interpreter's lock for up to a second.

        Return library and version of the grammars; empty: there are none.
        """
        grammars = self._model.grammars
        if grammars is None:
            return ""
        loop = asyncio.get_running_loop()
        fault = await loop.run_in_executor(self._grammar_compiler, grammars.start)
        if fault:
            log.warning("no answer can be held to a grammar here: %s", fault)
            return ""
        return grammars.version

    def _withdraw(self) -> None:
        """Keep new gateways and probes away: not ready any more, no run file."""
        self._liveness.mark_stopping()
        if self._settings.discovery_dir is not None:
            remove_run_file(self._settings.discovery_dir / f"{self._settings.name}.json")

    async def _drain(self) -> None:
        """After the first signal, report the drain to all gateways; they migrate their sessions (R13, migration).

        Returns when no session needs this server, or at the drain timeout.
        """
        await self._draining.wait()
        self._withdraw()
        began = self._clock()
        self._core.start_draining(began)
        self._flush()
        heartbeat = self._core.heartbeat()
        self._links.send(
            [Send(reply_address(peer), Lane.LIVE, heartbeat) for peer in self._heartbeats.peers]
        )
        self._passes.is_draining = True
        while self._core.is_in_use(self._clock()) or self._passes.is_busy:
            if self._clock() - began >= self._settings.drain_timeout_seconds:
                log.warning(
                    "drain timeout of %.1f s reached: stopping with sessions that were not migrated",
                    self._settings.drain_timeout_seconds,
                )
                return
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        log.info("drained in %.1f s", self._clock() - began)

    # Messages of links (LinkHandler)

    def on_link_up(self, peer: PeerId, hello: Hello) -> None:
        if hello.role is Role.GATEWAY:
            self._heartbeats.on_peer_connected(peer)
            if (fault := lease_fault(self._settings.lease_seconds, hello)) is not None:
                log.warning("%s", fault)
        lease = hello.lease_ms / 1000
        if hello.replaces:
            log.info("%s replaces %s, which ended", peer, ", ".join(hello.replaces))
        self._core.on_peer_connected(
            peer, hello.role, self._clock(), hello.target, lease, hello.replaces
        )
        self._flush()

    def on_link_down(self, peer: PeerId, reason: str) -> None:
        self._heartbeats.on_peer_lost(peer)
        self._core.on_peer_lost(peer, self._clock())
        self._flush()

    def on_items(self, peer: PeerId, items: list[Item]) -> None:
        now = self._clock()
        for item in items:
            if type(item) is ModelFileRequest:
                self._request_file(peer, item.name)
            else:
                self._core.receive(peer, item, now)
        self._flush()

    # Effects of the core

    def _flush(self) -> None:
        """Send the core's messages, then schedule the planning of a step."""
        sends = self._core.take_sends()
        if sends:
            self._links.send(sends)
            now = self._clock()
            for send in sends:
                self._heartbeats.on_sent(send.to.peer, now)
        for request in self._core.take_grammar_requests():
            self._compile_grammar(request)
        self._schedule_plan()

    def _schedule_plan(self) -> None:
        """Plan a step in the next pass of the loop, behind its reads: asyncio runs them before timers."""
        if not self._plan_scheduled and not self._step_running:
            self._plan_scheduled = True
            self._loop.call_at(self._clock(), self._plan_step)

    def _compile_grammar(self, request: GrammarRequest) -> None:
        """Compile a grammar off the engine thread; steps of other sessions go on meanwhile."""
        compiler = self._model.grammars

        def compile_it() -> None:
            fault = NO_GRAMMARS if compiler is None else compiler.prepare(request.grammar)
            self._loop.call_soon_threadsafe(self._on_grammar_ready, request, fault)

        self._grammar_compiler.submit(compile_it)

    def _on_grammar_ready(self, request: GrammarRequest, fault: str | None) -> None:
        if fault is not None:
            log.warning("session %s ends: %s", request.session, fault)
        self._core.on_grammar_ready(request, fault, self._clock())
        self._flush()

    def _plan_step(self) -> None:
        self._plan_scheduled = False
        if self._step_running or self._stop.is_set():
            return
        now = self._clock()
        try:
            work = self._schedule.next_turn(now, partial(self._core.plan_step, now))
        except Exception as fault:
            self._fail(fault)
            return
        if work is not None:
            self._step_running = True
            self._liveness.on_step_started()
            self._engine.submit(work)
        elif self._core.has_ready_transfers and not self._transfer_pause:
            self._transfer_pause = True
            self._loop.call_later(_TRANSFER_PAUSE_SECONDS, self._resume_transfers)

    def _resume_transfers(self) -> None:
        self._transfer_pause = False
        if not self._plan_scheduled:
            self._plan_step()

    def _on_part_done(self, done: PartDone) -> None:
        self._step_running = False
        self._liveness.on_step_finished()
        if done.lost is not None:
            self._fail(done.lost)
            return
        self._schedule.finish_part(done.result, self._clock())
        self._metrics.observe_part(done.seconds, done.result)
        self._schedule_plan()

    def _on_step_done(self, done: StepDone) -> None:
        self._step_running = False
        self._liveness.on_step_finished()
        if done.lost is not None:
            self._fail(done.lost)
            return
        now = self._clock()
        try:
            if done.error is None:
                self._core.finish_step(done.results, now, done.worked)
            else:
                if done.out_of_memory:
                    self._metrics.count_out_of_memory()
                    self._core.pause_admissions(now)
                self._core.fail_step(done.error, now, is_full=done.out_of_memory)
        except Exception as fault:
            self._fail(fault)
            return
        self._flush()
        self._metrics.observe_step(done.rows, done.seconds, done.error is not None)

    def _fail(self, fault: Exception) -> None:
        """End the process by an error between two steps. The loop would only log it, and the sessions would hang."""
        self._failure = fault
        self._stop.set()

    # Time, files, signals

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(BUSY_SECONDS)
            now = self._clock()
            self._liveness.on_loop()
            self._core.tick(now)
            self._flush()
            stats = self._core.stats
            self._metrics.set_stats(stats)
            due = self._heartbeats.take_due(now, self._core.busy_gateways)
            if due:
                heartbeat = self._core.heartbeat()
                self._links.send([Send(reply_address(peer), Lane.LIVE, heartbeat) for peer in due])

    async def _sample_stalls(self) -> None:
        while True:
            seconds = SAMPLE_SECONDS if self._core.has_running_sessions else BUSY_SECONDS
            await asyncio.sleep(seconds)
            self._core.sample_stalls(self._clock(), seconds)

    def _request_file(self, peer: PeerId, name: str) -> None:
        try:
            self._file_requests.put_nowait((peer, name))
        except asyncio.QueueFull:
            self._links.unlink(peer, "too many requests for model files")

    async def _send_files(self) -> None:
        while True:
            peer, name = await self._file_requests.get()
            content = await asyncio.to_thread(self._files.read_file, name)
            for chunk in file_chunks(name, content):
                while self._links.queued_bytes(peer, Lane.BULK) > _MAX_QUEUED_FILE_BYTES:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                self._links.send([Send(reply_address(peer), Lane.BULK, chunk)])

    def _on_signal(self) -> None:
        if self._draining.is_set():
            os._exit(1)  # second signal: exit at once
        self._draining.set()

    # Start

    async def _listen(self, target: str) -> str:
        try:
            return await self._links.listen(target, {PASS_METHOD: self._passes.serve})
        except OSError as error:
            raise UserError(
                "--listen", f"cannot listen on {target}: {error_text(error)}"
            ) from error

    def _announce(self, target: str) -> None:
        folder = self._settings.discovery_dir
        if folder is None:
            return
        metrics = "" if self._probe_server is None else self._probe_server.target
        try:
            member = self._identity.run_file(target, metrics)
            write_run_file(folder / f"{member.name}.json", member.model_dump())
        except OSError as error:
            raise UserError(
                "--discovery-dir", f"{folder} cannot be written: {error_text(error)}"
            ) from error


def replay_limit(settings: Settings, shape: ModelShape) -> int:
    """Return the host memory of the replay log, in bytes."""
    if settings.replay_memory is not None:
        return settings.replay_memory
    return replay_bytes(shape.row_bytes, shape.total_pages * shape.page_size)


def error_text(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
