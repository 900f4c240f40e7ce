"""`modelswarm demo`: one chat over four servers; one of them is killed in the middle, and the text continues.

The same chat runs twice, first without and then with the kill. The demo succeeds only if both runs give the same
tokens and the session was seen on another route after the kill.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from modelswarm.cli.demo.comparison import Comparison, Recording
from modelswarm.cli.demo.example import load_example
from modelswarm.cli.json_output.printing import print_json
from modelswarm.cli.terminal.signals import run_until_signal
from modelswarm.cli.terminal.tables import make_console
from modelswarm.cli.terminal.wrapping import WrappingWriter
from modelswarm.client.inference import InferenceClient, ReceivedChunk
from modelswarm.client.swarm import Route, SwarmClient, format_route, route_peers
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.local.child_process import Spawn, spawn_process
from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.local.supervisor import JobStatus
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of
from modelswarm.resources.loading import load_document

MAX_ANSWER_TOKENS = 1000
MIN_ANSWER_TOKENS = 20  # a shorter answer leaves no time for a kill in its middle
KILL_AFTER_FRACTION = 0.4  # of the tokens of the run without a kill
WORD_END_TOKENS = 10  # at most so many more until a word ends: the kill's line splits no number
ROUTE_CHECK_TOKENS = 2 * WORD_END_TOKENS  # after the kill: the session has its new route by then
REPLACEMENT_TIMEOUT_SECONDS = 30.0
MIN_REPLICAS = 2


class DemoError(ModelSwarmError):
    """The demo could not show a recovery."""


def run_demo(
    file: Path | None,
    question: str,
    hash_model: bool,
    as_json: bool = False,
    spawn: Spawn = spawn_process,
) -> int:
    """Run the demo with a document, or with the project's example; return the exit code.

    `as_json`: print one object at the end, and nothing else. `spawn` starts the processes.
    """
    plan = plan_document(load_document(file) if file else load_example())
    if plan.replicas < MIN_REPLICAS:
        raise UserError(
            "spec.replicas", f"{plan.replicas} leaves no server after a kill; allowed: 2 or more"
        )
    settings = LocalSettings(hash_model=hash_model, publish=False, run_name=f"demo-{os.getpid()}")
    swarm = LocalSwarm(plan, settings, spawn=spawn)
    out = Console(file=io.StringIO()) if as_json else make_console()
    with run_until_signal(swarm.stop):
        result, is_success = Demo(swarm, out, question).run()
    if as_json:
        print_json(asdict(result))
    return 0 if is_success else 1


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The fields of `demo --json`."""

    model: str
    question: str
    tokens: int  # of the answer with the kill
    identical: bool  # both answers have the same tokens and text, none lost or doubled
    migrated: bool  # the session was seen on a route without the killed server
    killed: str  # the server
    pid: int | None  # of its killed process
    route_before: tuple[str, ...]  # servers, head first
    route_after: tuple[str, ...]  # empty if none was seen
    longest_gap_ms: float
    median_gap_ms: float
    replaced_seconds: float | None  # from the end of the answer; None: not within 30 s
    seconds: float  # of the whole demo


class Demo:
    """The demo's steps, one method each."""

    def __init__(self, swarm: LocalSwarm, out: Console, question: str) -> None:
        self._swarm, self._out, self._question = swarm, out, question
        self._max_tokens = min(MAX_ANSWER_TOKENS, swarm.plan.max_length // 2)

    def run(self) -> tuple[DemoResult, bool]:
        """Run all steps; return the result, and whether the demo has shown a recovery."""
        began = time.monotonic()
        self._start()
        with (
            InferenceClient(self._swarm.grpc) as inference,
            SwarmClient(self._swarm.admin) as state,
        ):
            reference = self._run_reference(inference)
            comparison, killed, before = self._run_with_kill(inference, state, reference)
        replaced = self._wait_replaced(killed)
        self._print_report(comparison, killed)
        seconds = time.monotonic() - began
        self._out.print(f"({seconds:.0f} s)")
        interrupted = comparison.interrupted
        result = DemoResult(
            model=self._swarm.plan.served_name,
            question=self._question,
            tokens=len(interrupted.tokens),
            identical=comparison.is_identical,
            migrated=comparison.has_migrated,
            killed=killed.name,
            pid=killed.pid,
            route_before=tuple(name_of(hop.peer) for hop in before),
            route_after=tuple(name_of(peer) for peer in comparison.route_after),
            longest_gap_ms=round(interrupted.longest_gap * 1000, 1),
            median_gap_ms=round(interrupted.median_gap * 1000, 1),
            replaced_seconds=replaced,
            seconds=round(seconds, 1),
        )
        return result, comparison.is_success

    def _start(self) -> None:
        plan = self._swarm.plan
        spans = ", ".join(str(span) for span in plan.spans)
        self._out.print(
            f"Starting {plan.source}: {plan.n_blocks} blocks, split into spans {spans};"
        )
        self._out.print(f"{plan.replicas} server processes per span and one gateway ...")
        began = time.monotonic()
        self._swarm.start()
        for server in self._swarm.servers:
            self._out.print(
                f"  {server.job_status.name}  blocks {server.slot.span}  pid {server.job_status.pid}"
            )
        self._out.print(f"All are ready after {time.monotonic() - began:.1f} s.\n")

    def _run_reference(self, client: InferenceClient) -> Recording:
        self._out.print(f"1. Without a failure: {self._question!r}")
        reference = Recording(tuple(self._stream_answer(client)))
        if len(reference.tokens) < MIN_ANSWER_TOKENS:
            raise DemoError(f"the answer is too short for a kill in its middle: {reference.text!r}")
        rate = len(reference.tokens) / max(reference.seconds, 1e-9)
        self._out.print(f"   {len(reference.tokens)} tokens, {rate:.0f} per second. Recorded.\n")
        return reference

    def _run_with_kill(
        self, inference: InferenceClient, state: SwarmClient, reference: Recording
    ) -> tuple[Comparison, JobStatus, Route]:
        """Print the same chat, and send SIGKILL to the tail's server in the middle of it.

        Also return the killed server, and the route before.
        """
        self._out.print("2. The same again, with a kill in the middle:\n")
        kill_at = int(len(reference.tokens) * KILL_AFTER_FRACTION)
        text, chunks, seen = WrappingWriter(self._out.file), list[ReceivedChunk](), 0
        before: Route = ()
        after: Route = ()
        killed: JobStatus | None = None
        for chunk in self._stream_answer(inference):
            chunks.append(chunk)
            seen += len(chunk.tokens)
            text.write(chunk.text)
            if killed is None and seen >= kill_at and _is_word_end(chunk, seen - kill_at):
                before, killed = self._kill_tail(state)
                text.write_remark(f"*** SIGKILL: {killed.name}, pid {killed.pid} ***")
            elif killed is not None and not after and seen >= kill_at + ROUTE_CHECK_TOKENS:
                after = state.fetch_running_route()
        text.end_line()
        if killed is None:
            raise DemoError("the second answer ended before the kill: the runs differ")
        comparison = Comparison(
            reference, Recording(tuple(chunks)), before[-1].peer, route_peers(after)
        )
        self._out.print(f"\n   route before: {format_route(before)}")
        self._out.print(f"   route after:  {format_route(after) or 'none was seen'}\n")
        return comparison, killed, before

    def _stream_answer(self, client: InferenceClient) -> Iterator[ReceivedChunk]:
        return client.stream_chat(self._swarm.plan.served_name, self._question, self._max_tokens)

    def _kill_tail(self, state: SwarmClient) -> tuple[Route, JobStatus]:
        route = state.fetch_running_route()
        if not route:
            raise DemoError("the gateway shows no route for the running session")
        return route, self._swarm.kill(name_of(route[-1].peer))

    def _wait_replaced(self, killed: JobStatus) -> float | None:
        """Return the seconds until the killed server was ready again; None if it was not."""
        began = time.monotonic()
        if self._swarm.wait_replaced(killed.name, killed.incarnation, REPLACEMENT_TIMEOUT_SECONDS):
            wait = time.monotonic() - began
            self._out.print(
                f"{killed.name} is ready again, {wait:.1f} s after the end of the answer.\n"
            )
            return round(wait, 1)
        self._out.print(
            f"{killed.name} was not ready again within {REPLACEMENT_TIMEOUT_SECONDS:.0f} s.\n"
        )
        return None

    def _print_report(self, comparison: Comparison, killed: JobStatus) -> None:
        interrupted = comparison.interrupted
        self._out.print(f"killed server:  {killed.name} (pid {killed.pid}, SIGKILL)")
        self._out.print(f"tokens:         {len(interrupted.tokens)}")
        self._out.print(f"longest gap:    {interrupted.longest_gap * 1000:.0f} ms")
        self._out.print(f"median gap:     {interrupted.median_gap * 1000:.1f} ms")
        if not comparison.has_migrated:
            self._out.print("the session was not seen on another route after the kill")
        answer = "yes" if comparison.is_identical else "NO"
        self._out.print(f"identical to the run without a failure: {answer}")


def _is_word_end(chunk: ReceivedChunk, waited: int) -> bool:
    return chunk.text.endswith(" ") or waited >= WORD_END_TOKENS
