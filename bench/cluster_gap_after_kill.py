"""SIGKILL of the process in a hop's container until the next token at the client, on a real cluster: streams through
the gateway's Service, head and tail in turn.

As `gap_after_kill`, but what dies is a container on a node. Every stream is compared with the same stream without a
kill. The victim's pod is deleted afterwards, so that each kill meets fresh pods and no back-off of the kubelet.
"""

from __future__ import annotations

import os
import random
import signal
import time

from cluster.installed import Installed, pause_after
from cluster.quickstart import NAMESPACE
from swarm.running import Answer, Ask

from bench.gap_after_kill import differences
from bench.harness import Bar, Result, quantile
from bench.real_cluster import SHAPE, counting_swarm
from bench.swarm import Streamed

KILLS = int(os.environ.get("BENCH_CLUSTER_KILLS", "30"))
PROMPT, NEW, KILL_AT, VOCABULARY = 1000, 400, 40, 200


def run() -> Result:
    with counting_swarm() as place:
        return measure(place)


def measure(place: Installed) -> Result:
    rng = random.Random(7)
    gaps: list[float] = []
    lost = doubled = 0
    for number in range(KILLS):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(PROMPT))
        ask = Ask(prompt, NEW, model="counting")
        place.wait_whole()
        calm = place.stream(ask).answer()
        killed, gap = _killed(place, ask, hop=number % 2)
        gaps.append(gap)
        gone, again = differences(_streamed(calm), _streamed(killed))
        lost, doubled = lost + gone, doubled + again
    figures = {
        "p50_s": quantile(gaps, 0.5),
        "p99_s": quantile(gaps, 0.99),
        "max_s": max(gaps),
        "lost": lost,
        "doubled": doubled,
    }
    return Result(
        name="cluster_gap_after_kill",
        figures=figures,
        columns=("kills", "p50 s", "p99 s", "max s", "lost", "doubled"),
        rows=[
            (
                str(KILLS),
                *(f"{gap:.3f}" for gap in list(figures.values())[:3]),
                str(lost),
                str(doubled),
            )
        ],
        shape=f"{SHAPE}, prompt {PROMPT}",
        threads=1,
        bars=[
            Bar("p50_s", "<=", 0.5),
            Bar("p99_s", "<=", 2),
            Bar("lost", "<=", 0),
            Bar("doubled", "<=", 0),
        ],
    )


def _killed(place: Installed, ask: Ask, hop: int) -> tuple[Answer, float]:
    stream = place.stream(ask)
    stream.wait_tokens(KILL_AT)
    victim = place.carried(stream).servers[hop]
    (pid,) = place.cluster.container_pids(victim, NAMESPACE)
    if stream.done:
        raise RuntimeError("the stream ended before the kill")
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    answer = stream.answer()
    deleted = place.delete_pod(victim)
    place.lives.successor(victim, deleted, 180.0)
    return answer, pause_after(stream, killed)[0]


def _streamed(answer: Answer) -> Streamed:
    return Streamed(answer.tokens, answer.positions, ())
