"""Time until 20 new swarms of 10 pods each are Ready, on kwok's nodes.

From the first create request until the status of every swarm is Ready and not Progressing, as read by a client of the
API server. kwok makes a scheduled pod Ready at once, so this is the time of API server, scheduler and operator.
"""

from __future__ import annotations

import time

from bench.cluster.control_plane import REPLICAS, SPANS, control_plane, seconds_since
from bench.harness import Bar, Result

SWARMS = 20
TIMEOUT_SECONDS = 300.0


def run() -> Result:
    with control_plane(audit=True) as plane:
        before = plane.cpu_seconds()
        began = time.perf_counter()
        plane.create_swarms(SWARMS)
        applied = seconds_since(began)
        plane.wait_ready(SWARMS, TIMEOUT_SECONDS)
        seconds = seconds_since(began)
        cpu = plane.cpu_seconds() - before
        pods = plane.count_pods()
        _, requests = plane.read_requests()
    wanted = SWARMS * SPANS * REPLICAS
    if pods != wanted:
        raise RuntimeError(f"{pods} pods for {wanted} slots")
    creates = sum(made == ("create", "pods") for made in requests)
    return Result(
        name="operator_converge",
        figures={
            "seconds": seconds,
            "apply_s": applied,
            "operator_cpu_s": cpu,
            "pods": pods,
            "pod_creates": creates,
            "requests": len(requests),
        },
        columns=("swarms", "pods", "seconds", "operator CPU s", "operator's requests"),
        rows=[(str(SWARMS), str(pods), f"{seconds:.1f}", f"{cpu:.1f}", str(len(requests)))],
        shape=f"{SWARMS} swarms x {SPANS * REPLICAS} pods on kwok nodes, from zero",
        threads=1,
        bars=[Bar("seconds", "<=", 60), Bar("pod_creates", "<=", wanted)],
    )
