"""Run mypy with a cache that outlives the tree: a fresh clone takes seconds instead of two minutes.

The cache of the last good run is kept in `~/.cache/modelswarm/mypy-VERSION`. A tree without one starts with a copy of
it; mypy itself compares the content of every file with what it has cached. Used by `make check` and `make test`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelswarm"
OWN = ROOT / ".mypy_cache"


def main() -> int:
    kept = CACHE / f"mypy-{version('mypy')}"
    if not OWN.exists() and kept.is_dir():
        shutil.copytree(kept, OWN)
    before = newest(OWN)
    code = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, check=False).returncode
    if code == 0 and (newest(OWN) != before or not kept.is_dir()):
        keep(kept)
    return code


def newest(folder: Path) -> float:
    """Time of the last change of a file in it."""
    return max((file.stat().st_mtime for file in folder.rglob("*")), default=0.0)


def keep(kept: Path) -> None:
    """Replace the kept cache. Of two trees that do so at once the last one wins."""
    mine, old = (CACHE / f"{kept.name}.{kind}-{os.getpid()}" for kind in ("new", "old"))
    CACHE.mkdir(parents=True, exist_ok=True)
    shutil.copytree(OWN, mine)
    try:
        if kept.is_dir():
            kept.rename(old)
        mine.rename(kept)
    except OSError:  # another tree was faster
        shutil.rmtree(mine, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
