"""The host's limit of inotify instances, of which each kubelet and containerd takes several.

Raised while there is any cluster, and put back when the last one goes. Used by `open_network` and `down`, both under
`lock_claims()`. Nothing else of the host's settings is changed.
"""

from __future__ import annotations

from pathlib import Path

from tools.devcluster.build.build import cache_folder

INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
ENOUGH = 4096


def raise_limits() -> None:
    before = int(INSTANCES.read_text())
    if before < ENOUGH:
        _kept().write_text(str(before))
        INSTANCES.write_text(str(ENOUGH))


def restore_limits() -> None:
    kept = _kept()
    if kept.exists():
        INSTANCES.write_text(kept.read_text())
        kept.unlink()


def _kept() -> Path:
    return cache_folder() / "inotify-instances-before"
