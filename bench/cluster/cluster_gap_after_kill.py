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

from support.kubernetes.quickstart import NAMESPACE
from support.kubernetes.release import Release, pause_after
from support.processes.streams import Answer, Ask

from bench.cluster.real_cluster import SHAPE, counting_swarm
from bench.harness import Bar, Result
from bench.recovery.gaps import Gaps
from bench.swarm import Streamed

KILLS = int(os.environ.get("BENCH_CLUSTER_KILLS", "30"))
PROMPT, NEW, KILL_AT, VOCABULARY = 1000, 400, 40, 200


def run() -> Result:
    with counting_swarm() as place:
        return measure(place)


def measure(place: Release) -> Result:
    rng = random.Random(7)
    gaps = Gaps()
    for number in range(KILLS):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(PROMPT))
        ask = Ask(prompt, NEW, model="counting")
        place.wait_whole()
        calm = place.stream(ask).answer()
        killed, gap = _killed(place, ask, hop=number % 2)
        gaps.add(_streamed(calm), _streamed(killed), gap)
    bars = [Bar("p50_s", "<=", 0.5), Bar("p99_s", "<=", 2)]
    return gaps.result("cluster_gap_after_kill", "kills", f"{SHAPE}, prompt {PROMPT}", bars)


def _killed(place: Release, ask: Ask, hop: int) -> tuple[Answer, float]:
    stream = place.stream(ask)
    stream.wait_tokens(KILL_AT)
    victim = place.find_route(stream).servers[hop]
    (pid,) = place.cluster.container_pids(victim, NAMESPACE)
    if stream.done:
        raise RuntimeError("the stream ended before the kill")
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    answer = stream.answer()
    deleted = place.delete_pod(victim)
    place.pod_log.wait_successor(victim, deleted, 180.0)
    return answer, pause_after(stream, killed)[0]


def _streamed(answer: Answer) -> Streamed:
    return Streamed(answer.tokens, answer.positions, ())
