"""Time from SIGSTOP of a server on the route to the next token at the client: 1K-token contexts, 2 spans x 2 servers.

A frozen server's links stay up, because its kernel acknowledges data; only missing heartbeats show the fault. SIGCONT
follows after each stream, and the server must not change that stream: it is compared with the same stream without a
freeze (`lost`, `doubled`). MODELSWARM_BENCH_FREEZES sets the number of freezes.
"""

from __future__ import annotations

import os
import random
import signal
import time

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.recovery.gap_after_kill import KILL_AT, NEW, PROMPT
from bench.recovery.gaps import GapStatistics, longest_pause
from bench.swarm import Recorder, StreamClient, StreamResult, bench_swarm
from modelswarm.client.swarm import SwarmClient
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of

FREEZES = int(os.environ.get("MODELSWARM_BENCH_FREEZES", "50"))
UNSUSPECTED_TIMEOUT_SECONDS = 60.0  # seconds until a continued server's heartbeats arrive


def run() -> Result:
    gaps = GapStatistics()
    rng = random.Random(11)
    with bench_swarm(model_folder("27m"), spans=2, replicas=2, max_length=1200) as swarm:
        client, view = StreamClient(swarm.grpc), SwarmClient(swarm.admin)
        for number in range(FREEZES):
            prompt = [rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)]
            undisturbed = client.run_stream(prompt, NEW)
            gaps.add(undisturbed, *stream_with_freeze(swarm, client, view, prompt, hop=number % 2))
    shape = "Llama 27M fp32, 2 spans x 2 servers, prompt 1000"
    return gaps.result("gap_after_freeze", "freezes", shape, [Bar("p99_s", "<=", 2.0)])


def stream_with_freeze(
    swarm: LocalSwarm, client: StreamClient, view: SwarmClient, prompt: list[int], hop: int
) -> tuple[StreamResult, float]:
    """Return the stream, and the seconds from the freeze to the next token after those in transit."""
    recorder = Recorder()
    frozen_at, victim = 0.0, ""
    try:
        for part in client.stream_parts(prompt, NEW):
            recorder.add(part)
            if not victim and len(recorder.tokens) >= KILL_AT:
                victim = name_of(view.fetch_running_route()[hop].peer)
                swarm.kill(victim, signal.SIGSTOP)
                frozen_at = time.perf_counter()
    finally:
        if victim:
            swarm.kill(victim, signal.SIGCONT)
    if not victim:
        raise RuntimeError("the stream ended before the freeze")
    wait_until_not_suspected(view)
    return recorder.result(), longest_pause(recorder.times, frozen_at)


def wait_until_not_suspected(view: SwarmClient) -> None:
    """Wait until no server is suspected. An often frozen server may stay ejected, as a last resort."""
    deadline = time.monotonic() + UNSUSPECTED_TIMEOUT_SECONDS
    while any(server.health == "suspected" for server in view.fetch_snapshot().servers):
        if time.monotonic() > deadline:
            raise RuntimeError("the server is still suspected after SIGCONT")
        time.sleep(0.1)
