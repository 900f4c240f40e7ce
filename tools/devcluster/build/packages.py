"""What real nodes need beside the programs that are built here: root, Debian packages and kernel features.

Used by `make cluster-packages`, by `up` (which falls back to the API level and says why) and by the fixture `cluster`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

NEEDED = {  # Debian package: a file of it
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iptables": "/usr/sbin/iptables",
    "nftables": "/usr/sbin/nft",
    "conntrack": "/usr/sbin/conntrack",
    "iproute2": "/usr/sbin/ip",
    "openssl": "/usr/bin/openssl",
    "debootstrap": "/usr/sbin/debootstrap",
    "buildah": "/usr/bin/buildah",
    "skopeo": "/usr/bin/skopeo",
    "prometheus": "/usr/bin/prometheus",
}
KEEP_STOPPED = "#!/bin/sh\nexit 101\n"  # the answer of policy-rc.d that says: start no services


NO_GO = "Go is not installed: the cluster's programs are built from source"


class CannotInstall(RuntimeError):
    """The packages can't be had here; the message says why."""


def can_build() -> bool:
    return shutil.which("go") is not None


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def missing_packages() -> list[str]:
    return [package for package, file in NEEDED.items() if not Path(file).exists()]


def obstacles() -> list[str]:
    """Why real nodes can't run here, one sentence each; nothing when they can."""
    found = []
    if os.geteuid() != 0:
        found.append("not root: namespaces, mounts and control groups can't be made")
    packages = missing_packages()
    if packages:
        found.append(f"missing Debian packages: {', '.join(packages)} (make cluster-packages)")
    if not can_build():
        found.append(NO_GO)
    kernel = Path("/proc/filesystems").read_text()
    if "overlay" not in kernel:
        found.append("the kernel has no overlayfs: containers have no root file system")
    if not Path("/sys/fs/cgroup").is_dir() or not any(Path("/sys/fs/cgroup").iterdir()):
        found.append("no control groups are mounted at /sys/fs/cgroup")
    return found


def install() -> None:
    """The missing packages, without starting any of their services."""
    packages = missing_packages()
    if not packages:
        print("cluster packages: all there")
        return
    words = ("apt-get", "install", "--yes", "--no-install-recommends", *packages)
    if not can_install():
        raise CannotInstall(f"missing: {', '.join(packages)}. As root on Debian: {' '.join(words)}")
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text(KEEP_STOPPED)
        policy.chmod(0o755)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wait = ("-o", "DPkg::Lock::Timeout=300")
    try:
        subprocess.run(("apt-get", *wait, "--quiet", "update"), env=environment, check=False)
        if subprocess.run((*words, *wait, "--quiet"), env=environment, check=False).returncode != 0:
            raise CannotInstall(f"{' '.join(words)} failed; its words are above")
    finally:
        if ours:
            policy.unlink()
