"""The project's own images for the test cluster: operator, gateway and the server without torch.

Built by `tools/make_images.py` from the working tree on the test base image, and kept in the cache by the content of
what goes into them. Used by the fixture `cluster` and by `make cluster`.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

from tools.devcluster.build.build import cache_folder, file_lock
from tools.devcluster.build.images import BASE_IMAGE, build_with_base
from tools.devcluster.reporting import progress

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("operator", "gateway", "server-slim")
SOURCES = ("images", "modelswarm", "gateway", "operator", "serving")
FILES = ("pyproject.toml", "README.md", "LICENSE", "tools/make_images.py")
KEPT = 3  # versions in the cache


def project_archives() -> tuple[Path, ...]:
    """Return OCI archives of the images, named localhost/modelswarm/TARGET:VERSION; they are built if need be."""
    made = folder()
    with file_lock(made):
        if not made.is_dir():
            with progress(f"build images {', '.join(TARGETS)}"):
                _build(made)
            _forget_old()
        made.touch()
    return tuple(made / f"{target}.tar" for target in TARGETS)


def folder() -> Path:
    """Return the place of the archives for the tree as it is now, whether they are there or not."""
    return cache_folder() / f"project-{_key()}"


def was_built_before() -> bool:
    """Say whether the builder has the layers below the project's own code."""
    return any(each.is_dir() for each in cache_folder().glob("project-*"))


def _build(final: Path) -> None:
    half = final.with_name(f".{final.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    tool = (sys.executable, str(ROOT / "tools" / "make_images.py"), *TARGETS)
    build_with_base((*tool, "--builder=buildah", f"--base={BASE_IMAGE}", f"--archives={half}"))
    half.rename(final)


def _key() -> str:
    digest = hashlib.sha256(BASE_IMAGE.encode())
    files = [ROOT / name for name in FILES]
    for source in SOURCES:
        files += [file for file in (ROOT / source).rglob("*") if file.is_file()]
    for file in sorted(files):
        if "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _forget_old() -> None:
    found = [each for each in cache_folder().glob("project-*") if each.is_dir()]
    for old in sorted(found, key=lambda each: each.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old)
