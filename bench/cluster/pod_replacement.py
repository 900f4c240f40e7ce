"""Time from the request to delete a server's pod until its replacement is created and until it is Ready, on real nodes.

For comparison, the time from SIGKILL of a container's process until the kubelet has the same pod Ready again. Times
are taken from a watch of the API server. Graceful and forced deletions alternate, as do slots and containers.
"""

from __future__ import annotations

import os
import signal
import time

from support.kubernetes.event_log import PodTimes
from support.kubernetes.quickstart import NAMESPACE
from support.kubernetes.release import Release

from bench.cluster.real_cluster import SHAPE, counting_cluster
from bench.harness import Bar, Result, quantile

DELETIONS = int(os.environ.get("BENCH_DELETIONS", "20"))
KILLS = int(os.environ.get("BENCH_CONTAINER_KILLS", "4"))  # one per pod: kubelets back off
TIMEOUT_SECONDS = 180.0


def run() -> Result:
    with counting_cluster() as place:
        return measure_replacement(place)


def measure_replacement(place: Release) -> Result:
    restarts = [_kill_container(place, number) for number in range(KILLS)]
    replacements = [_delete_pod(place, number) for number in range(DELETIONS)]
    created = [life.created - asked for asked, life in replacements]
    ready = [life.ready - asked for asked, life in replacements]
    return Result(
        name="pod_replacement",
        figures={
            "created_p50_s": quantile(created, 0.5),
            "created_max_s": max(created),
            "ready_p50_s": quantile(ready, 0.5),
            "ready_max_s": max(ready),
            "container_ready_p50_s": quantile(restarts, 0.5),
        },
        columns=("what", "times", "created p50 s", "max s", "Ready p50 s", "max s"),
        rows=[
            ("pod deleted", str(DELETIONS), *_format_seconds(created), *_format_seconds(ready)),
            ("container killed", str(KILLS), "-", "-", *_format_seconds(restarts)),
        ],
        shape=SHAPE,
        threads=1,
        bars=[Bar("created_p50_s", "<=", 1)],
    )


def _format_seconds(seconds: list[float]) -> tuple[str, str]:
    return f"{quantile(seconds, 0.5):.2f}", f"{max(seconds):.2f}"


def _delete_pod(place: Release, number: int) -> tuple[float, PodTimes]:
    """Delete a pod; return (the time of the request, its replacement)."""
    place.wait_whole()
    names = sorted(pod["metadata"]["name"] for pod in place.pods())
    victim = names[number % len(names)]
    asked = place.delete_pod(victim, force=number % 2 == 1)
    return asked, place.pod_log.wait_successor(victim, asked, TIMEOUT_SECONDS)


def _kill_container(place: Release, number: int) -> float:
    place.wait_whole()
    name = sorted(pod["metadata"]["name"] for pod in place.pods())[number % 4]
    (pid,) = place.cluster.container_pids(name, NAMESPACE)
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    return place.pod_log.wait_ready_again(name, killed, TIMEOUT_SECONDS).ready - killed
