"""The commands of docs/kubernetes.md, unchanged: block by block, in a shell, in the repository's root.

Installs the release for the tests on real nodes. Only the folder of the cluster is replaced.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.kubernetes.api_client import CRD_NAME

from tools.devcluster.__main__ import DEFAULT_STATE
from tools.devcluster.control_plane.kubectl import CommandFailed
from tools.devcluster.real import RealCluster

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "kubernetes.md"
NAMESPACE = "modelswarm"
BLOCKS = ("cluster", "install", "ask", "kill", "scale", "away")
SECONDS = 420.0
LOCK = Path(tempfile.gettempdir()) / "modelswarm-quickstart.lock"


def blocks() -> dict[str, str]:
    """Return the blocks of the quickstart by name."""
    section = PAGE.read_text().split("## Quickstart\n")[1].split("\n## ")[0]
    found = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return dict(zip(BLOCKS, found, strict=True))


@dataclass(frozen=True, slots=True)
class Quickstart:
    cluster: RealCluster

    def run(self, name: str) -> str:
        """Run one block up to its first failing command, which raises, and return the output."""
        text = blocks()[name].replace(str(DEFAULT_STATE), str(self.cluster.layout.root))
        if "port-forward" not in text:
            return self._run(text)
        with LOCK.open("w") as lock:  # another tree of this machine may use the same port
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._run(text)

    def _run(self, text: str) -> str:
        root = self.cluster.layout.root
        done = subprocess.run(
            (
                "bash",
                "-euo",
                "pipefail",
                "-c",
                f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{text}",
            ),
            env={
                **os.environ,
                "KUBECONFIG": str(self.cluster.kubeconfig),
                "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
                **self.cluster.kubectl.caches(),
            },
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode != 0:
            output = f"{done.stdout}\n{done.stderr}\n{self._explain()}"
            raise AssertionError(f"{text}\n{output}")
        return done.stdout

    def _explain(self) -> str:
        """Return the pods and the last lines of their logs."""
        kubectl = self.cluster.kubectl.in_namespace(NAMESPACE)
        logs = ("logs", "--selector=app.kubernetes.io/part-of=modelswarm", "--prefix", "--tail=20")
        try:
            return f"{kubectl('get', 'pods', '-o', 'wide')}\n{kubectl(*logs)}"
        except CommandFailed as error:
            return f"there are no logs: {error}"


def remove_installation(cluster: RealCluster) -> None:
    """Remove all objects of an earlier installation, with finalizers if no operator runs."""
    kubectl = cluster.kubectl.in_namespace(NAMESPACE)
    if cluster.kubectl.find("crd", CRD_NAME) is not None:
        kubectl("delete", "modelswarms", "--all", "--wait=false")
        for found in kubectl.items("modelswarms"):
            name, nothing = found["metadata"]["name"], '{"metadata": {"finalizers": null}}'
            kubectl("patch", "modelswarm", name, "--type=merge", "-p", nothing)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("delete", "crd", CRD_NAME, "--ignore-not-found")
    for kind in ("clusterrole", "clusterrolebinding", "persistentvolume"):
        mine = [each["metadata"]["name"] for each in cluster.kubectl.items(kind)]
        for name in (name for name in mine if name.startswith(f"{NAMESPACE}-")):
            cluster.kubectl("delete", kind, name)
