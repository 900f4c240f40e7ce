"""Time from SIGKILL of a server's process in its container to the next token at the client, on a real cluster.

Like `gap_after_kill`, but on nodes and through the gateway's Service; head and tail are killed in turn. Every stream is
compared with the same stream without a kill. The victim's pod is deleted afterwards, so that no kill meets a back-off
of the kubelet.
"""

from __future__ import annotations

import os
import random
import signal
import time

from support.kubernetes.quickstart import NAMESPACE
from support.kubernetes.release import Release, pause_after
from support.processes.streams import Answer, Request

from bench.cluster.real_cluster import SHAPE, counting_cluster
from bench.harness import Bar, Result
from bench.recovery.gaps import GapStatistics
from bench.swarm import StreamResult

KILLS = int(os.environ.get("BENCH_CLUSTER_KILLS", "30"))
PROMPT, NEW, KILL_AT, VOCABULARY = 1000, 400, 40, 200


def run() -> Result:
    with counting_cluster() as place:
        return measure_gaps(place)


def measure_gaps(place: Release) -> Result:
    rng = random.Random(7)
    gaps = GapStatistics()
    for number in range(KILLS):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(PROMPT))
        request = Request(prompt, NEW, model="counting")
        place.wait_whole()
        undisturbed = place.stream(request).answer()
        killed, gap = _stream_with_kill(place, request, hop=number % 2)
        gaps.add(_to_result(undisturbed), _to_result(killed), gap)
    bars = [Bar("p50_s", "<=", 0.5), Bar("p99_s", "<=", 2)]
    return gaps.result("cluster_gap_after_kill", "kills", f"{SHAPE}, prompt {PROMPT}", bars)


def _stream_with_kill(place: Release, request: Request, hop: int) -> tuple[Answer, float]:
    stream = place.stream(request)
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


def _to_result(answer: Answer) -> StreamResult:
    return StreamResult(answer.tokens, answer.positions, ())
