"""Images for the test cluster: the pause image, and a small Debian with Python on which the project's images are built.

All are made here, none is pulled: from Debian packages (debootstrap) and by buildah with a store of its own in the
cache folder. Used by `RealCluster` and by tests. The result is one OCI archive per image, kept in the cache by the
content of its sources.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.devcluster.build.build import (
    cache_folder,
    file_lock,
    find_part,
    part_folder,
    program_path,
)
from tools.devcluster.build.oci import write_program_image
from tools.devcluster.nodes.containerd import PAUSE_IMAGE
from tools.devcluster.reporting import progress

BASE_IMAGE = "localhost/modelswarm-base:1"
BASE_SUITE = "bookworm"
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
UNNEEDED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/lib/apt/lists",
    "var/cache/apt",
    "var/log",
)
BUILD_SECONDS = 1800.0
STORE_IMAGES = 400  # layers in the store before it is emptied: some gigabytes
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{store}/store"
runroot = "{store}/run"
"""


def pause_archive() -> Path:
    archive = part_folder(find_part("pause")).parent / "pause.tar"
    built = program_path("pause")
    with file_lock(archive):
        if not archive.exists():
            half = archive.with_suffix(".half")
            write_program_image(built, PAUSE_IMAGE, half)
            half.rename(archive)
    return archive


def base_archive() -> Path:
    """Return an archive of Debian with Python 3.11 (`python3 -m venv` too), without documents; about 130 MB."""
    archive = base_file()
    with file_lock(archive):
        if not archive.exists():
            with progress("base image by debootstrap"):
                _make_base(archive)
    return archive


def base_file() -> Path:
    """Return the archive's place, whether it is there or not."""
    recipe = f"{BASE_IMAGE} {BASE_SUITE} {BASE_PACKAGES} {UNNEEDED}"
    return cache_folder() / f"base-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.tar"


def _pull_base() -> None:
    """Put the base image into buildah's store, if it is not there."""
    archive = base_archive()
    found = _buildah("images", "--quiet", "--filter", f"reference={BASE_IMAGE}").split()
    if not found:
        _buildah("pull", f"oci-archive:{archive}:{BASE_IMAGE}")


def _make_base(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="modelswarm-base-") as folder:
        root = Path(folder) / "root"
        include = f"--include={','.join(BASE_PACKAGES)}"
        _run(("debootstrap", "--variant=minbase", include, BASE_SUITE, str(root)))
        for name in UNNEEDED:
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(parents=True, exist_ok=True)
        container = _buildah("from", "scratch").strip()
        try:
            _buildah("add", "--quiet", container, str(root), "/")
            _buildah("config", "--env", "PYTHONUNBUFFERED=1", "--cmd", "python3", container)
            _buildah("commit", "--quiet", container, BASE_IMAGE)
        finally:
            _buildah("rm", container)
        half = archive.with_suffix(".half")
        half.unlink(missing_ok=True)
        _buildah("push", BASE_IMAGE, f"oci-archive:{half}:{BASE_IMAGE}")
        half.rename(archive)


def _buildah(*words: str) -> str:
    return run_builder(("buildah", *words))


def build_with_base(command: Sequence[str]) -> None:
    """Run a build that may start from the base image: one at a time, and the store is emptied when it has grown."""
    with file_lock(cache_folder() / "builds"):
        if len(_buildah("images", "--all", "--quiet").split()) > STORE_IMAGES:
            with progress("empty the image store"):
                _buildah("rmi", "--all", "--force")
        _pull_base()
        run_builder(command)


def run_builder(command: Sequence[str]) -> str:
    """Run a builder with its store in the cache folder, and in a mount namespace of its own."""
    store = cache_folder() / "buildah"
    config = store / "storage.conf"
    store.mkdir(parents=True, exist_ok=True)
    config.write_text(STORAGE.format(store=store))
    alone = ("unshare", "--mount", "--propagation", "private") if os.geteuid() == 0 else ()
    return _run((*alone, *command), {"CONTAINERS_STORAGE_CONF": str(config)})


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        ("nice", "-n", "5", *command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if environment is None else subprocess.PIPE,
        text=True,
        timeout=BUILD_SECONDS,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    if done.returncode != 0:
        end = "\n".join(f"{done.stdout}{done.stderr or ''}".splitlines()[-30:])
        raise RuntimeError(f"{' '.join(command)} failed:\n{end}")
    return done.stdout
