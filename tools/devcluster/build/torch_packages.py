"""Torch for server pods: the image without it has the Python of Debian bookworm, and mounts these packages.

A virtual environment with that Python has them. For any other Python, as that of Ubuntu, they are downloaded once into
the cache: the versions that the server image pins. Used by the preparation and by the values of the chart.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tools.devcluster.build.build import cache_folder, file_lock
from tools.devcluster.reporting import progress

IMAGE_PYTHON = "3.11"
REQUIREMENTS = Path(__file__).parents[3] / "images" / "requirements" / "torch.txt"
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def is_missing() -> bool:
    """Return whether torch must be downloaded first."""
    return not _folder().is_dir()


def torch_packages() -> Path:
    """Return the folder with torch for the images' Python. Download it if it is not there."""
    folder = _folder()
    if folder.is_dir():
        return folder
    with file_lock(folder):
        if not folder.is_dir():
            half = folder.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            with progress(f"torch for Python {IMAGE_PYTHON}, that of the images"):
                _download(half)
            half.rename(folder)
    return folder


def _folder() -> Path:
    if OWN_PYTHON == IMAGE_PYTHON:
        return Path(sysconfig.get_path("purelib"))
    recipe = REQUIREMENTS.read_text(encoding="utf-8") + os.environ.get("TORCH_INDEX_URL", "")
    return cache_folder() / f"torch-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def _download(folder: Path) -> None:
    """Install into the folder by pip, as images/Dockerfile does."""
    index = os.environ.get("TORCH_INDEX_URL", "")
    if index:  # its wheels have other hashes, so only the version is pinned
        [torch] = re.findall(r"^torch==\S+", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)
        wanted: tuple[str, ...] = ("--index-url", index, torch)
    else:
        wanted = ("--no-deps", "--require-hashes", "-r", str(REQUIREMENTS))
    done = subprocess.run(
        (
            *(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)),
            *("--python-version", IMAGE_PYTHON, "--only-binary=:all:", *wanted),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"torch can't be installed into {folder}: {done.stderr.strip()[-2000:]}")
