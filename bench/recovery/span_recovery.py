"""Recovery time of one lost span relative to all four: seconds from SIGKILL to the next token, 1K-token contexts.

Both kinds of loss alternate on one swarm of 4 spans x 2 servers. Either one server of the route is killed, a different
one each time, or all four at once. With the replay logs of the other servers, only the lost blocks are computed again.
`ratio` is the ratio of the medians. MODELSWARM_BENCH_RECOVERIES sets the number of rounds.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence

from bench.harness import Bar, Result, quantile
from bench.models import SHAPES, model_folder
from bench.recovery.gaps import NO_TOKEN_LOST, GapStatistics, longest_pause
from bench.swarm import Recorder, StreamClient, StreamResult, bench_swarm
from modelswarm.client.swarm import SwarmClient
from modelswarm.local.supervisor import JobStatus
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of

ROUNDS = int(os.environ.get("MODELSWARM_BENCH_RECOVERIES", "20"))
SPANS = 4
PROMPT, NEW, KILL_AT = 1000, 40, 10
REPLACE_TIMEOUT_SECONDS = 90.0


def run() -> Result:
    rng = random.Random(5)
    gaps = {1: GapStatistics(), SPANS: GapStatistics()}
    with bench_swarm(model_folder("27m"), spans=SPANS, replicas=2, max_length=1200) as swarm:
        client, view = StreamClient(swarm.grpc), SwarmClient(swarm.admin)
        for number in range(ROUNDS):
            prompt = [rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)]
            undisturbed = client.run_stream(prompt, NEW)
            for places in ([number % SPANS], range(SPANS)):
                gaps[len(places)].add(
                    undisturbed, *stream_with_kills(swarm, client, view, prompt, places)
                )
    one, all_ = gaps[1].seconds, gaps[SPANS].seconds
    ratio = statistics.median(one) / statistics.median(all_)
    return Result(
        name="span_recovery",
        figures={
            "ratio": ratio,
            "one_p50_s": quantile(one, 0.5),
            "all_p50_s": quantile(all_, 0.5),
            "one_max_s": max(one),
            "all_max_s": max(all_),
            "lost": sum(each.lost for each in gaps.values()),
            "doubled": sum(each.doubled for each in gaps.values()),
        },
        columns=("lost spans", "recoveries", "p50 s", "max s"),
        rows=[
            ("1 of 4", str(len(one)), f"{quantile(one, 0.5):.3f}", f"{max(one):.3f}"),
            ("4 of 4", str(len(all_)), f"{quantile(all_, 0.5):.3f}", f"{max(all_):.3f}"),
        ],
        shape=f"Llama 27M fp32, {SPANS} spans x 2 servers, prompt {PROMPT}",
        threads=1,
        bars=[Bar("ratio", "<=", 0.4), *NO_TOKEN_LOST],
    )


def stream_with_kills(
    swarm: LocalSwarm,
    client: StreamClient,
    view: SwarmClient,
    prompt: list[int],
    places: Sequence[int],
) -> tuple[StreamResult, float]:
    """Return the stream, and the seconds from the kill of these hops to the next token after those in transit."""
    recorder = Recorder()
    killed: list[JobStatus] = []
    killed_at = 0.0
    for part in client.stream_parts(prompt, NEW):
        recorder.add(part)
        if not killed and len(recorder.tokens) >= KILL_AT:
            route = view.fetch_running_route()
            killed_at = time.perf_counter()
            killed = [swarm.kill(name_of(route[place].peer)) for place in places]
    if not killed:
        raise RuntimeError("the stream ended before the kill")
    for victim in killed:
        if not swarm.wait_replaced(victim.name, victim.incarnation, REPLACE_TIMEOUT_SECONDS):
            raise RuntimeError(f"{victim.name} was not replaced")
    if not swarm.wait_ready(REPLACE_TIMEOUT_SECONDS):
        raise RuntimeError("the servers were not all ready again in time")
    return recorder.result(), longest_pause(recorder.times, killed_at)
