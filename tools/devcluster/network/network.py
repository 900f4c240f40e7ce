"""The network of one cluster: a network namespace of its own with one bridge per node, and a cable to the host.

All changes that nodes and kube-proxy make to links, routes and nft tables happen in that namespace. So two clusters do
not affect each other, and nothing of it outlives the namespace. The host reaches pods, Services and kubelets by
one route; pods reach the API server at the host's end of the cable. Used by `RealCluster` and its nodes. Knows nothing
of Kubernetes.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.devcluster.build.build import cache_folder
from tools.devcluster.network.namespace_holder import hold_namespaces
from tools.devcluster.nodes.limits import raise_limits
from tools.devcluster.processes import Processes

HOLDER = (
    "network"  # the process that keeps this namespace, and a mount namespace for the nodes' disks
)
OCTETS = range(200, 250)  # 10.OCTET.0.0/16 belongs to one cluster
LINK = "msw"  # with the octet: the host's end of a cluster's cable
UPLINK = "uplink"
TABLE = "modelswarm"  # the nft table in there


@dataclass(frozen=True, slots=True)
class Network:
    """The addresses of one cluster."""

    octet: int
    holder: int  # pid of a process inside the namespace

    @property
    def host_link(self) -> str:
        """The host's end of the cable. A cluster owns an octet by having a link of that name."""
        return f"{LINK}{self.octet}"

    @property
    def cidr(self) -> str:
        return f"10.{self.octet}.0.0/16"

    @property
    def pods(self) -> str:
        return f"10.{self.octet}.0.0/17"

    @property
    def services(self) -> str:
        return f"10.{self.octet}.128.0/17"

    @property
    def first_service(self) -> str:
        return f"10.{self.octet}.128.1"

    @property
    def host_ip(self) -> str:
        """The address of the host as pods see it: the API server listens there."""
        return f"10.{self.octet}.127.1"

    @property
    def inner_ip(self) -> str:
        """The address of the namespace itself: cluster DNS listens there."""
        return f"10.{self.octet}.127.2"

    def node_cidr(self, index: int) -> str:
        return f"10.{self.octet}.{index}.0/24"

    def node_ip(self, index: int) -> str:
        return f"10.{self.octet}.{index}.1"

    def bridge(self, index: int) -> str:
        return f"node{index}"

    def run(self, *words: str, stdin: str = "") -> str:
        """Run a command inside the namespace."""
        return run_command("nsenter", f"--net=/proc/{self.holder}/ns/net", *words, stdin=stdin)


def open_network(processes: Processes) -> Network:
    """Make a namespace, choose a free octet, and add the cable and the route."""
    holder = hold_namespaces(processes, HOLDER, "net")
    with lock_claims():
        raise_limits()
        network = _claim(holder)
    run_command("ip", "address", "add", f"{network.host_ip}/30", "dev", network.host_link)
    run_command("ip", "link", "set", network.host_link, "up")
    run_command("ip", "route", "add", network.cidr, "via", network.inner_ip)
    network.run("ip", "link", "set", "lo", "up")
    network.run("ip", "address", "add", f"{network.inner_ip}/30", "dev", UPLINK)
    network.run("ip", "link", "set", UPLINK, "up")
    network.run("ip", "route", "add", "default", "via", network.host_ip)
    for setting in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
        if (Path("/proc/sys") / setting).exists():
            network.run("sh", "-c", f"echo 1 > /proc/sys/{setting}")
    network.run("nft", "-f", "-", stdin=_tables())
    return network


def add_bridge(network: Network, index: int) -> None:
    """Add a node's bridge with its address, which the kubelet looks for."""
    bridge = network.bridge(index)
    network.run("ip", "link", "add", bridge, "type", "bridge")
    network.run("ip", "address", "add", f"{network.node_ip(index)}/24", "dev", bridge)
    network.run("ip", "link", "set", bridge, "up")
    pods = list(ipaddress.ip_network(network.node_cidr(index)).hosts())
    network.run(
        "nft",
        "-f",
        "-",
        stdin=f"add element inet {TABLE} self {{ {', '.join(f'{p} . {p}' for p in pods)} }}",
    )


def cut_off_node(network: Network, index: int) -> None:
    """Drop all packets from and to a node's pods, so that no peer sees a connection close."""
    network.run("nft", "add", "element", "inet", TABLE, "dead", f"{{ {network.bridge(index)} }}")


def reconnect_node(network: Network, index: int) -> None:
    network.run("nft", "delete", "element", "inet", TABLE, "dead", f"{{ {network.bridge(index)} }}")


def close_network(octet: int) -> None:
    """Delete the cable. The kernel does so with the namespace too, but later."""
    link = f"{LINK}{octet}"
    done = subprocess.run(
        ("ip", "link", "delete", link), capture_output=True, text=True, check=False
    )
    if done.returncode != 0 and link in claimed_links():
        raise RuntimeError(f"{link} can't be deleted: {done.stderr.strip()}")


@contextmanager
def lock_claims() -> Iterator[None]:
    """Let no other process start or remove a cluster of this machine meanwhile."""
    lock = cache_folder() / "claims.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def claimed_links() -> list[str]:
    """Return the links of all clusters on this machine."""
    return sorted(link.name for link in Path("/sys/class/net").glob(f"{LINK}[0-9]*"))


def run_command(*words: str, stdin: str = "") -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _claim(holder: int) -> Network:
    """Choose an octet. A link's name is unique on the host: the cluster that makes the link owns the octet."""
    routed = _routed()
    for octet in OCTETS:
        network = Network(octet, holder)
        if any(ipaddress.ip_network(network.cidr).overlaps(each) for each in routed):
            continue
        done = subprocess.run(
            (
                *("ip", "link", "add", network.host_link, "type", "veth"),
                *("peer", "name", UPLINK, "netns", str(holder)),
            ),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return network
        if "File exists" not in done.stderr:
            raise RuntimeError(f"a virtual cable can't be made: {done.stderr.strip()}")
    raise RuntimeError(f"no free network in 10.{OCTETS.start}.0.0 to 10.{OCTETS.stop - 1}.0.0")


def _routed() -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    routes = json.loads(run_command("ip", "-json", "-4", "route"))
    return [ipaddress.ip_network(r["dst"]) for r in routes if r["dst"] != "default"]


def _tables() -> str:
    """Return the nft tables for failing nodes and for kube-proxy, beside those that Kubernetes itself writes."""
    silent = [
        "chain in { type filter hook prerouting priority -300; iifname @dead drop; }",
        "chain out { type filter hook forward priority -300; oifname @dead drop; }",
        "chain own { type filter hook output priority -300; oifname @dead drop; }",
    ]
    # One kube-proxy serves all nodes and takes only one node's pods for its own. A pod of another node may reach itself
    # through a Service, and its answer must come back this way as well.
    itself = "chain itself { type nat hook postrouting priority srcnat; ip saddr . ip daddr @self masquerade; }"
    sets = ["set dead { type ifname; }", "set self { type ipv4_addr . ipv4_addr; }"]
    return f"table inet {TABLE} {{\n{'; '.join(sets)}\n{chr(10).join([*silent, itself])}\n}}\n"
