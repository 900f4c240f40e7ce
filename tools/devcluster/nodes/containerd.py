"""containerd of one node: its own root, state, socket and CNI configuration.

Used by `Node`. Runs in the node's namespaces: bridges and port maps are made there, and so are all mounts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.devcluster.build.build import program_path
from tools.devcluster.network.network import Network
from tools.devcluster.processes import Processes, command_lines
from tools.devcluster.waiting import wait_for

PAUSE_IMAGE = "localhost/modelswarm-pause:1"
CNI_PROGRAMS = Path("/usr/lib/cni")
RUNC = Path("/usr/sbin/runc")
READY_SECONDS = 120.0
CONFIG = """\
version = 3
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = [
  "io.containerd.nri.v1.nri",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{folder}/c.sock"
[plugins."io.containerd.shim.v1.manager"]
  socket_dir = "{sockets}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  enable_selinux = false
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{cni_programs}"]
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        Root = "{folder}/state/runc"
        SystemdCgroup = false
"""


class Containerd:
    """One node's container runtime."""

    def __init__(self, name: str, folder: Path, processes: Processes) -> None:
        self.process = f"containerd-{name}"
        self._folder = folder
        self._processes = processes

    @property
    def socket(self) -> Path:
        return self._folder / "c.sock"

    @property
    def disk(self) -> Path:
        """The folder of images and containers."""
        return self._folder / "root"

    def start(self, network: Network, index: int, inside: int) -> None:
        """Start it in the namespaces of the process `inside`, which are the node's."""
        self._write_config(network, index)
        programs = program_path("containerd").parent  # with the shim beside it
        self._processes.start(
            self.process,
            (programs / "containerd", "--config", self._folder / "config.toml"),
            environment={"PATH": f"{programs}:{os.environ['PATH']}"},
            inside=inside,
        )

        def answers() -> bool:
            self._processes.check_running(self.process)
            return self._ctr("version", check=False).returncode == 0

        log_end = self._processes.log_end
        wait_for(
            f"{self.process} answering",
            answers,
            READY_SECONDS,
            explain=lambda: log_end(self.process),
        )

    def import_image(self, archive: Path) -> list[str]:
        """Import an OCI or docker archive, and return the names of its images."""
        before = set(self.images())
        self._ctr("images", "import", str(archive))
        return sorted(set(self.images()) - before)

    def images(self) -> list[str]:
        return self._ctr("images", "list", "-q").stdout.split()

    def pids(self, identities: Sequence[str]) -> list[int]:
        """Return the first process of each of these containers that runs."""
        lines = [line.split() for line in self._ctr("tasks", "list").stdout.splitlines()[1:]]
        running = {words[0]: int(words[1]) for words in lines if words[2] == "RUNNING"}
        return [running[identity] for identity in identities if identity in running]

    def kill(self) -> None:
        """Kill the daemon and the shims; the containers run on."""
        self._processes.kill(self.process)
        for pid in self._shims():
            os.kill(pid, signal.SIGKILL)

    def remove_state(self) -> None:
        """Remove what a real machine keeps in memory and loses at a reboot."""
        shutil.rmtree(self._folder / "state", ignore_errors=True)
        self.socket.unlink(missing_ok=True)

    def _shims(self) -> list[int]:
        """Return the shims of this node: each names its socket on the command line."""
        mark = str(self.socket)
        return [
            pid
            for pid, words in command_lines()
            if words[0].endswith("containerd-shim-runc-v2") and mark in words
        ]

    def _ctr(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = (str(program_path("ctr")), "-a", str(self.socket), "-n", "k8s.io", *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"ctr {' '.join(words)}: {done.stderr.strip()}")
        return done

    def _write_config(self, network: Network, index: int) -> None:
        cni = self._folder / "cni"
        cni.mkdir(parents=True, exist_ok=True)
        (cni / "10-modelswarm.conflist").write_text(
            json.dumps(_conflist(network, index, self._folder / "addresses"), indent=1)
        )
        text = CONFIG.format(
            folder=self._folder,
            sockets=shim_sockets(network.octet, index),
            pause=PAUSE_IMAGE,
            cni_programs=CNI_PROGRAMS,
            runc=RUNC,
        )
        (self._folder / "config.toml").write_text(text)


def shim_sockets(octet: int, index: int) -> Path:
    """Return a folder outside of the node's: containerd accepts a path of at most 42 letters."""
    return Path(f"/tmp/msw{octet}-node{index}-shims")


def _conflist(network: Network, index: int, addresses: Path) -> dict[str, object]:
    ranges = [[{"subnet": network.node_cidr(index), "gateway": network.node_ip(index)}]]
    bridge = {
        "type": "bridge",
        "bridge": network.bridge(index),
        "isGateway": True,
        "ipMasq": False,  # the host has a route to every pod: no address need be hidden
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": ranges,
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(addresses),
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "modelswarm", "plugins": [bridge, portmap]}
