"""The folders and files of one cluster, all below one folder.

Used by every part. `down` needs nothing but this folder to remove the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders and files of one cluster."""

    root: Path

    def make(self) -> Layout:
        for folder in (self.root, self.pids, self.logs, self.pki, self.config):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def record(self) -> Path:
        """The record of what was started, for `down`."""
        return self.root / "cluster.json"

    @property
    def pids(self) -> Path:
        return self.root / "pids"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.root / "kubeconfig"

    def node(self, name: str) -> Path:
        return self.root / "nodes" / name
