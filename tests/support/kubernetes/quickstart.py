"""The commands of docs/kubernetes.md, run word for word: block by block, in a shell, in the repository's root.

Used by the end-to-end tests, whose installation they are. Only the folder of the cluster is another one.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.devcluster.__main__ import DEFAULT_STATE
from tools.devcluster.real import RealCluster

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "kubernetes.md"
NAMESPACE = "modelswarm"
CRD = "modelswarms.modelswarm.io"
BLOCKS = ("cluster", "install", "ask", "kill", "scale", "away")
SECONDS = 420.0


def blocks() -> dict[str, str]:
    """Of the quickstart, by what they are for."""
    section = PAGE.read_text().split("## Quickstart\n")[1].split("\n## ")[0]
    found = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return dict(zip(BLOCKS, found, strict=True))


@dataclass(frozen=True, slots=True)
class Quickstart:
    cluster: RealCluster

    def run(self, name: str) -> str:
        """The output of one block; it ends at the first command that fails."""
        root = self.cluster.layout.root
        text = blocks()[name].replace(str(DEFAULT_STATE), str(root))
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
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def remove_installation(cluster: RealCluster) -> None:
    """Whatever a run before left, in whatever state: the operator that would let a swarm go may be gone already."""
    kubectl = cluster.kubectl.in_namespace(NAMESPACE)
    if cluster.kubectl.find("crd", CRD) is not None:
        kubectl("delete", "modelswarms", "--all", "--wait=false")
        for found in kubectl.items("modelswarms"):
            name, nothing = found["metadata"]["name"], '{"metadata": {"finalizers": null}}'
            kubectl("patch", "modelswarm", name, "--type=merge", "-p", nothing)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found")
    for kind in ("clusterrole", "clusterrolebinding", "persistentvolume"):
        mine = [each["metadata"]["name"] for each in cluster.kubectl.items(kind)]
        for name in (name for name in mine if name.startswith(f"{NAMESPACE}-")):
            cluster.kubectl("delete", kind, name)
