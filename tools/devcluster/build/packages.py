"""The machine's own part of a cluster: Linux, root, Go, Debian packages and kernel features.

Used by `make cluster-packages`, by the verbs that start or prepare a cluster, and by the tests' fixtures. Installs
packages, builds nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.devcluster.reporting import tell

API_PACKAGES = {"openssl": "/usr/bin/openssl"}  # Debian package: a file of it
NODE_PACKAGES = {
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iptables": "/usr/sbin/iptables",
    "nftables": "/usr/sbin/nft",
    "conntrack": "/usr/sbin/conntrack",
    "iproute2": "/usr/sbin/ip",
    "debootstrap": "/usr/sbin/debootstrap",
    "buildah": "/usr/bin/buildah",
}
TEST_PACKAGES = {"prometheus": "/usr/bin/prometheus"}
BROWSER_PACKAGES = {  # of the tests that open the page of `modelswarm ui`
    "chromium": "/usr/bin/chromium",
    "chromium-driver": "/usr/bin/chromedriver",
}
KEEP_STOPPED = "#!/bin/sh\nexit 101\n"  # this answer of policy-rc.d starts no services
PLATFORM = sys.platform
FILESYSTEMS = Path("/proc/filesystems")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OLDEST_GO = (1, 21)  # from here on, Go fetches the version that a go.mod asks for


class InstallError(RuntimeError):
    """The packages can't be installed here; the message has the reason and the command."""


def missing_packages(wanted: dict[str, str]) -> list[str]:
    return [package for package, file in wanted.items() if not Path(file).exists()]


def api_obstacles() -> list[str]:
    """Return why not even an API server can run here, one sentence each."""
    return platform_obstacles() or [*go_obstacles(), *_package_obstacles(API_PACKAGES)]


def obstacles() -> list[str]:
    """Return why real nodes can't run here, one sentence each."""
    wanted = {**API_PACKAGES, **NODE_PACKAGES}
    return platform_obstacles() or [*machine_obstacles(), *_package_obstacles(wanted)]


def platform_obstacles() -> list[str]:
    """Return the obstacle of another operating system. It comes alone: nothing else can be looked at there."""
    if PLATFORM == "linux":
        return []
    return [f"Linux is needed: a cluster uses /proc and namespaces, and this is {PLATFORM}"]


def build_obstacles() -> list[str]:
    """Return why no program of a cluster can be built and run here."""
    return platform_obstacles() or go_obstacles()


def machine_obstacles() -> list[str]:
    """Return the obstacles to real nodes that no package removes."""
    if found := platform_obstacles():
        return found
    if os.geteuid() != 0:
        found.append("not root: namespaces, mounts and control groups can't be made (use sudo)")
    found += go_obstacles()
    if "overlay" not in FILESYSTEMS.read_text():
        found.append("the kernel has no overlayfs: containers have no root file system")
    if not CONTROL_GROUPS.is_dir() or not any(CONTROL_GROUPS.iterdir()):
        found.append(f"no control groups are mounted at {CONTROL_GROUPS}")
    return found


def go_obstacles() -> list[str]:
    """Return why nothing can be built here, if so."""
    if shutil.which("go") is None:
        return [
            "Go is not installed: the cluster's programs are built from source (get it: go.dev/dl)"
        ]
    output = subprocess.run(("go", "version"), capture_output=True, text=True, check=False).stdout
    found = re.search(r"go(\d+)\.(\d+)", output)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST_GO:
        return [f"{found[0]} is too old: Go 1.21 or newer is needed (get it: go.dev/dl)"]
    return []


def _package_obstacles(wanted: dict[str, str]) -> list[str]:
    packages = missing_packages(wanted)
    listed = ", ".join(packages)
    return [f"missing Debian packages: {listed} (make cluster-packages)"] if packages else []


def install_command(packages: list[str]) -> str:
    return f"apt-get install --yes --no-install-recommends {' '.join(packages)}"


def check_installable(packages: list[str]) -> None:
    """Raise InstallError if there are packages to install and no way to do so."""
    if not packages:
        return
    if shutil.which("apt-get") is None:
        files = {**API_PACKAGES, **NODE_PACKAGES, **TEST_PACKAGES, **BROWSER_PACKAGES}
        listed = ", ".join(f"{package} ({files[package]})" for package in packages)
        raise InstallError(
            f"missing programs: {listed}. They come from Debian packages, and there is no apt-get: "
            "Debian or Ubuntu is needed, or these programs at these paths"
        )
    if os.geteuid() != 0:
        raise InstallError(
            f"Debian packages are missing. Install them as root: {install_command(packages)}"
        )


def install_obstacles(wanted: dict[str, str]) -> list[str]:
    """Return the reason why missing packages of `wanted` can't be installed, if so."""
    try:
        check_installable(missing_packages(wanted))
    except InstallError as refusal:
        return [str(refusal)]
    return []


def install(packages: list[str]) -> None:
    """Install Debian packages without starting any of their services."""
    check_installable(packages)
    if not packages:
        tell("Debian packages: all are installed")
        return
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text(KEEP_STOPPED)
        policy.chmod(0o755)
    try:
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *packages)
    finally:
        if ours:
            policy.unlink()


def _apt_get(verb: str, *words: str) -> None:
    """An `update` that fails is no reason to stop: the packages may be known already."""
    command = ("apt-get", "-o", "DPkg::Lock::Timeout=300", "--quiet", verb, *words)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0 and verb != "update":
        end = "\n".join(done.stdout.splitlines()[-20:])
        raise InstallError(f"{' '.join(command)} failed ({done.returncode}):\n{end}")
