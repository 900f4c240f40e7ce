"""Removes a cluster with nothing but its folder, and checks that nothing of it is left.

Used by `RealCluster.down`, by `make cluster-down`, and by every new cluster for those whose owner has ended.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.devcluster.build.build import cache_folder, file_lock
from tools.devcluster.layout import Layout
from tools.devcluster.network.network import close_network
from tools.devcluster.nodes.cgroups import hierarchies
from tools.devcluster.nodes.machine import clean_host
from tools.devcluster.nodes.node import Node
from tools.devcluster.processes import Processes, command_lines
from tools.devcluster.record import folders_with_records, read_record
from tools.devcluster.waiting import wait_for

PARENT = Path("/tmp")
PREFIX = "modelswarm-cluster"
GONE_SECONDS = 10.0


def remove_cluster(layout: Layout, processes: Processes | None = None) -> str:
    """Remove everything of a cluster, and return a line that says so."""
    record = read_record(layout)
    processes = processes or Processes(layout)
    octet = record.octet if record is not None else -1
    nodes = [
        Node(layout, octet, index + 1, processes)
        for index in range(record.nodes if record is not None else 0)
    ]
    names = processes.names()
    contained = sum(node.kill_processes() for node in nodes)
    for name in reversed(processes.names()):
        processes.kill(name)
    for node in nodes:
        node.remove()
    if octet >= 0:
        close_network(octet)
    clean_host()
    shutil.rmtree(layout.root)
    wait_for(
        "the cluster's traces to go",
        lambda: not leftovers(layout, octet),
        GONE_SECONDS,
        explain=lambda: "\n".join(leftovers(layout, octet)),
    )
    if not nodes:
        return f"{len(names)} processes and their files: gone"
    return (
        f"{len(names)} processes, {contained} processes of pods,"
        f" {len(nodes)} nodes with their mounts, bridges, nft tables and control groups: gone"
    )


def leftovers(layout: Layout, octet: int) -> list[str]:
    """Return everything that still belongs to the cluster: nothing, after `remove_cluster`."""
    found = [f"folder {layout.root}"] if layout.root.exists() else []
    found += [f"mount {mount}" for mount in mounts_below(layout.root)]
    mark = f"{layout.root}/"
    for pid, words in command_lines():
        if any(mark in word for word in words):
            found.append(f"process {pid} {' '.join(words)[:120]}")
    if octet >= 0:
        link = Path(f"/sys/class/net/msw{octet}")
        found += [f"link {link.name}"] if link.exists() else []
        for hierarchy in hierarchies():
            found += [f"group {group}" for group in hierarchy.glob(f"modelswarm-{octet}-*")]
        found += [f"folder {folder}" for folder in PARENT.glob(f"msw{octet}-*")]
    return found


def mounts_below(folder: Path) -> list[str]:
    """Return the mounts of this process's own mount namespace; nodes have theirs."""
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [place for place in places if Path(place).is_relative_to(folder)]


def remove_orphans() -> list[Path]:
    """Remove the clusters of processes that ended without doing so; return their folders."""
    swept = []
    with file_lock(cache_folder() / "sweep"):  # two processes would remove the same cluster
        for folder in folders_with_records(PARENT, PREFIX):
            layout = Layout(folder)
            record = read_record(layout)
            if record is not None and record.orphaned:
                remove_cluster(layout)
                swept.append(folder)
    return swept
