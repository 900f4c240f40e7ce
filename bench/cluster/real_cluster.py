"""A real cluster for benchmarks: two nodes, the project's images, the chart and the counting swarm.

Installed by the quickstart of docs/kubernetes.md. Built from `tools/devcluster` and `tests/support/kubernetes`. Like
`make cluster`, it needs Linux, root and Go. Used by `pod_replacement` and `cluster_gap_after_kill`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.kubernetes.quickstart import Quickstart
from support.kubernetes.release import Release, open_release

from tools.devcluster.build.packages import obstacles
from tools.devcluster.build.project_images import project_archives
from tools.devcluster.down import PARENT, PREFIX
from tools.devcluster.layout import Layout
from tools.devcluster.real import RealCluster, RealSettings

SHAPE = "counting 1.6M fp32, 2 spans x 2 server pods, 2 gateways, on 2 nodes of one machine"


@contextmanager
def counting_cluster() -> Iterator[Release]:
    """Yield a cluster with the counting swarm, all its pods Ready."""
    problems = obstacles()
    if problems:
        raise RuntimeError(f"no real nodes here: {'; '.join(problems)}")
    layout = Layout(Path(tempfile.mkdtemp(prefix=f"{PREFIX}-", dir=PARENT)))
    cluster = RealCluster(layout, RealSettings(archives=project_archives()))
    try:
        cluster.start()
        with installed_swarm(cluster) as place:
            yield place
    finally:
        cluster.down()


@contextmanager
def installed_swarm(cluster: RealCluster) -> Iterator[Release]:
    """Install the project and the counting swarm on a new cluster, and wait until all pods are Ready."""
    Quickstart(cluster).run("install")
    with open_release(cluster) as place:
        place.wait_whole()
        yield place
