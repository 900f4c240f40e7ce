"""`modelswarm demo`: one chat over four servers; one of them is killed in the middle; the text goes on.

The same chat runs twice: first undisturbed, then with the kill. It is a success only if both say the same, token for
token, and the session really moved to another server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from modelswarm.cli.demo.comparison import Recording, Comparison
from modelswarm.cli.demo.example import load_example
from modelswarm.cli.terminal.signals import ignore_signals, interrupt_on_signals
from modelswarm.cli.terminal.tables import make_console
from modelswarm.cli.terminal.wrapping import WrappingWriter
from modelswarm.client.inference import ReceivedChunk, InferenceClient
from modelswarm.client.swarm import Route, SwarmClient, route_peers, format_route
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.local.supervisor import JobStatus
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of
from modelswarm.resources.loading import load_document

QUESTION = "Count from 1 to 200."
MAX_ANSWER_TOKENS = 1000
MIN_ANSWER_TOKENS = 20  # a shorter answer has no middle to kill in
KILL_AFTER_FRACTION = 0.4  # of the undisturbed run's tokens
WORD_END_TOKENS = 10  # tokens to wait for the end of a word: the remark cuts no number in two
ROUTE_CHECK_TOKENS = 2 * WORD_END_TOKENS  # tokens, when the session has its new route
REPLACEMENT_TIMEOUT_SECONDS = 30.0
MIN_REPLICAS = 2


class DemoError(ModelSwarmError):
    """The swarm did not do what the demo is to show."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--question", default=QUESTION, show_default=True, help="What the model is asked.")
@click.option(
    "--hash-model", is_flag=True, help="Run the exact test model instead of the transformer."
)
def demo(file: Path | None, question: str, hash_model: bool) -> int:
    """Show that a stream survives: start a swarm, chat, kill a server in the middle of the answer.

    FILE is a swarm document with two or more servers per span; without it the project's example.
    """
    plan = plan_document(load_document(file) if file else load_example())
    if plan.replicas < MIN_REPLICAS:
        raise UserError(
            "spec.replicas", f"{plan.replicas} leaves nobody after a kill; allowed: 2 or more"
        )
    settings = LocalSettings(hash_model=hash_model, publish=False, run_name=f"demo-{os.getpid()}")
    with interrupt_on_signals():
        swarm = LocalSwarm(plan, settings)
        try:
            return Demo(swarm, make_console(), question).run()
        finally:
            ignore_signals()
            swarm.stop()


class Demo:
    """The story, one step a method."""

    def __init__(self, swarm: LocalSwarm, out: Console, question: str) -> None:
        self._swarm, self._out, self._question = swarm, out, question
        self._max_tokens = min(MAX_ANSWER_TOKENS, swarm.plan.max_length // 2)

    def run(self) -> int:
        """The exit code."""
        began = time.monotonic()
        self._start()
        with InferenceClient(self._swarm.grpc) as tokens, SwarmClient(self._swarm.grpc) as swarm_door:
            calm = self._run_reference(tokens)
            verdict, killed = self._run_with_kill(tokens, swarm_door, calm)
        self._print_replacement(killed)
        self._print_report(verdict, killed)
        self._out.print(f"({time.monotonic() - began:.0f} s)")
        return 0 if verdict.is_success else 1

    def _start(self) -> None:
        plan = self._swarm.plan
        spans = ", ".join(str(span) for span in plan.spans)
        self._out.print(f"Starting {plan.source}: {plan.n_blocks} blocks, cut into spans {spans};")
        self._out.print(f"{plan.replicas} server processes per span and a gateway before them ...")
        began = time.monotonic()
        self._swarm.start()
        for server in self._swarm.servers:
            self._out.print(f"  {server.job_status.name}  blocks {server.slot.span}  pid {server.job_status.pid}")
        self._out.print(f"All serve after {time.monotonic() - began:.1f} s.\n")

    def _run_reference(self, tokens: InferenceClient) -> Recording:
        self._out.print(f"1. Without a failure: {self._question!r}")
        calm = Recording(tuple(self._stream_answer(tokens)))
        if len(calm.tokens) < MIN_ANSWER_TOKENS:
            raise DemoError(f"the answer is too short to be disturbed: {calm.text!r}")
        rate = len(calm.tokens) / max(calm.seconds, 1e-9)
        self._out.print(f"   {len(calm.tokens)} tokens, {rate:.0f} per second. Recorded.\n")
        return calm

    def _run_with_kill(
        self, tokens: InferenceClient, swarm_door: SwarmClient, calm: Recording
    ) -> tuple[Comparison, JobStatus]:
        """The same chat on the terminal; SIGKILL to the server of the last span in the middle of it."""
        self._out.print("2. The same again, with a kill in the middle:\n")
        kill_at = int(len(calm.tokens) * KILL_AFTER_FRACTION)
        text, arrivals, seen = WrappingWriter(self._out.file), list[ReceivedChunk](), 0
        before: Route = ()
        after: Route = ()
        killed: JobStatus | None = None
        for arrival in self._stream_answer(tokens):
            arrivals.append(arrival)
            seen += len(arrival.tokens)
            text.write(arrival.text)
            if killed is None and seen >= kill_at and _is_word_end(arrival, seen - kill_at):
                before, killed = self._kill_tail(swarm_door)
                text.write_remark(f"*** SIGKILL: {killed.name}, pid {killed.pid} ***")
            elif killed is not None and not after and seen >= kill_at + ROUTE_CHECK_TOKENS:
                after = swarm_door.fetch_running_route()
        text.end_line()
        if killed is None:
            raise DemoError("the second answer ended before the kill: the runs differ")
        verdict = Comparison(calm, Recording(tuple(arrivals)), before[-1].peer, route_peers(after))
        self._out.print(f"\n   route before: {format_route(before)}")
        self._out.print(f"   route after:  {format_route(after) or 'none was seen'}\n")
        return verdict, killed

    def _stream_answer(self, tokens: InferenceClient) -> Iterator[ReceivedChunk]:
        return tokens.stream_chat(self._swarm.plan.served_name, self._question, self._max_tokens)

    def _kill_tail(self, swarm_door: SwarmClient) -> tuple[Route, JobStatus]:
        route = swarm_door.fetch_running_route()
        if not route:
            raise DemoError("the gateway shows no route for the running session")
        return route, self._swarm.kill(name_of(route[-1].peer))

    def _print_replacement(self, killed: JobStatus) -> None:
        began = time.monotonic()
        if self._swarm.wait_replaced(killed.name, killed.incarnation, REPLACEMENT_TIMEOUT_SECONDS):
            wait = time.monotonic() - began
            self._out.print(
                f"{killed.name} serves again, {wait:.1f} s after the end of the answer.\n"
            )
        else:
            self._out.print(
                f"{killed.name} did not serve again within {REPLACEMENT_TIMEOUT_SECONDS:.0f} s.\n"
            )

    def _print_report(self, verdict: Comparison, killed: JobStatus) -> None:
        disturbed = verdict.interrupted
        self._out.print(f"killed server:  {killed.name} (pid {killed.pid}, SIGKILL)")
        self._out.print(f"tokens:         {len(disturbed.tokens)}")
        self._out.print(f"longest gap:    {disturbed.longest_gap * 1000:.0f} ms")
        self._out.print(f"median gap:     {disturbed.median_gap * 1000:.1f} ms")
        if not verdict.has_migrated:
            self._out.print("the session was not seen on another route after the kill")
        answer = "yes" if verdict.is_identical else "NO"
        self._out.print(f"identical to the run without a failure: {answer}")


def _is_word_end(arrival: ReceivedChunk, waited: int) -> bool:
    return arrival.text.endswith(" ") or waited >= WORD_END_TOKENS
