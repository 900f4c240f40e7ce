"""Load of an idle operator: 100 swarms of 10 pods each, all Ready, for ten minutes.

`writes` counts the writing requests of the operator's account in the API server's audit log, without Lease renewals.
The process is probed like by a kubelet and scraped like by Prometheus; its CPU time includes both.
"""

from __future__ import annotations

import os
import time
from collections import Counter

from bench.cluster.control_plane import REPLICAS, SPANS, WRITES, ControlPlane, control_plane
from bench.harness import Bar, Result

SWARMS = int(os.environ.get("BENCH_IDLE_SWARMS", "100"))
SECONDS = float(os.environ.get("BENCH_IDLE_SECONDS", "600"))
SETTLE_SECONDS = 30.0  # seconds after the last swarm is ready, for late events of its pods
TIMEOUT_SECONDS = 900.0
PROBES = {"ready": 2.0, "live": 10.0, "metrics": 15.0}  # intervals in seconds, as in the chart


def run() -> Result:
    with control_plane(audit=True) as plane:
        plane.create_swarms(SWARMS)
        plane.wait_ready(SWARMS, TIMEOUT_SECONDS)
        time.sleep(SETTLE_SECONDS)
        skip, _ = plane.read_requests()
        cpu, began = plane.cpu_seconds(), time.perf_counter()
        _probe_operator(plane, SECONDS)
        elapsed = time.perf_counter() - began
        cpu = plane.cpu_seconds() - cpu
        time.sleep(2.0)  # seconds until the log has all requests
        _, requests = plane.read_requests(skip)
        memory, log = plane.memory_mib(), plane.operator.text()
    counted = Counter(requests)
    leases = sum(n for (verb, kind), n in counted.items() if kind == "leases" and verb in WRITES)
    writes = sum(n for (verb, _), n in counted.items() if verb in WRITES) - leases
    lists = sum(n for (verb, _), n in counted.items() if verb == "list")
    if writes:  # print all requests and the log, to find the cause
        for (verb, kind), count in sorted(counted.items()):
            print(f"  {verb} {kind}: {count}")
        print(log[-4000:])
    return Result(
        name="operator_idle",
        figures={
            "writes": writes,
            "cpu_fraction": cpu / elapsed,
            "lease_writes": leases,
            "lists": lists,
            "seconds": elapsed,
            "memory_mib": memory,
        },
        columns=("seconds", "writes", "CPU of a core", "Lease writes", "lists", "RSS MiB"),
        rows=[
            (
                f"{elapsed:.0f}",
                str(writes),
                f"{cpu / elapsed:.4f}",
                str(leases),
                str(lists),
                f"{memory:.0f}",
            )
        ],
        shape=f"{SWARMS} swarms x {SPANS * REPLICAS} pods on kwok nodes, all Ready",
        threads=1,
        bars=[Bar("writes", "<=", 0), Bar("cpu_fraction", "<=", 0.01)],
    )


def _probe_operator(plane: ControlPlane, seconds: float) -> None:
    now = time.monotonic()
    end, due = now + seconds, dict.fromkeys(PROBES, now)
    while (now := time.monotonic()) < end:
        for name, every in PROBES.items():
            if now >= due[name]:
                due[name] = now + every
                code, text = plane.operator.probe(name)
                if code != 200:
                    raise RuntimeError(f"/{name} answers {code}: {text}")
        time.sleep(max(0.0, min(end, *due.values()) - time.monotonic()))
