"""Time from SIGKILL of a server on the route to the next token at the client: 1K-token contexts, 2 spans x 2 servers.

Every stream is compared with the same stream without a kill. `lost` and `doubled` count tokens whose position is
missing or repeated; a token that differs counts as lost. The killed server has been replaced before the next kill,
while the next stream without a kill runs. MODELSWARM_BENCH_KILLS sets the number of kills.
"""

from __future__ import annotations

import math
import os
import random
import time

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.recovery.gaps import GapStatistics, longest_pause
from bench.swarm import Recorder, StreamClient, StreamResult, bench_swarm
from modelswarm.client.swarm import SwarmClient
from modelswarm.local.supervisor import JobStatus
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of

KILLS = int(os.environ.get("MODELSWARM_BENCH_KILLS", "200"))
PROMPT, NEW, KILL_AT = 1000, 60, 20
REPLACE_TIMEOUT_SECONDS = 60.0


def run() -> Result:
    shape = "Llama 27M fp32, 2 spans x 2 servers, prompt 1000, only the lost span is rebuilt"
    bars = [Bar("p50_s", "<=", 0.5), Bar("p99_s", "<=", 2.0)]
    return measure_gaps(KILLS).result("gap_after_kill", "kills", shape, bars)


def measure_gaps(
    kills: int, server_flags: tuple[str, ...] = (), seconds: float = math.inf
) -> GapStatistics:
    """Kill so many servers of a swarm, each under a stream of its own; only the first one begins after `seconds`."""
    gaps = GapStatistics()
    rng = random.Random(7)
    folder = model_folder("27m")
    with bench_swarm(
        folder, spans=2, replicas=2, max_length=1200, server_flags=server_flags
    ) as swarm:
        client, view = StreamClient(swarm.grpc), SwarmClient(swarm.admin)
        victim = None
        began = time.monotonic()
        for number in range(kills):
            if number and time.monotonic() - began > seconds:
                break
            prompt = [rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)]
            undisturbed = client.run_stream(prompt, NEW)
            if victim is not None:
                wait_replaced(swarm, victim)
            disturbed, gap, victim = stream_with_kill(swarm, client, view, prompt, hop=number % 2)
            gaps.add(undisturbed, disturbed, gap)
    return gaps


def stream_with_kill(
    swarm: LocalSwarm, client: StreamClient, view: SwarmClient, prompt: list[int], hop: int
) -> tuple[StreamResult, float, JobStatus]:
    """Return the stream, the seconds from the kill to the next token after those in transit, and the killed server."""
    recorder = Recorder()
    killed_at = 0.0
    victim = None
    for part in client.stream_parts(prompt, NEW):
        recorder.add(part)
        if victim is None and len(recorder.tokens) >= KILL_AT:
            victim = swarm.kill(name_of(view.fetch_running_route()[hop].peer))
            killed_at = time.perf_counter()
    if victim is None:
        raise RuntimeError("the stream ended before the kill")
    return recorder.result(), longest_pause(recorder.times, killed_at), victim


def wait_replaced(swarm: LocalSwarm, victim: JobStatus) -> None:
    if not swarm.wait_replaced(victim.name, victim.incarnation, REPLACE_TIMEOUT_SECONDS):
        raise RuntimeError(f"{victim.name} was not replaced")
