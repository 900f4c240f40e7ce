"""Virtual environments with clients of other projects, whose dependencies conflict with ours.

An environment is made once and kept in ~/.cache/modelswarm; its name is a hash of the packages and of Python's version.
Used by tests of the full tier. Knows no client.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelswarm"
INSTALL_SECONDS = 900.0
RUN_SECONDS = 300.0


class ClientEnvironment:
    def __init__(self, packages: Sequence[str]) -> None:
        """Install the packages, unless an earlier test did. They are named with their versions."""
        key = hashlib.sha256(json.dumps([*packages, sys.version]).encode()).hexdigest()[:16]
        self._folder = CACHE / f"clients-{key}"
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / f"{self._folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._folder.is_dir():
                self._install(packages)

    def _install(self, packages: Sequence[str]) -> None:
        """Install into a folder that gets its name when it is complete. No program in it may be run by its own path."""
        unfinished = self._folder.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(unfinished)], check=True)
        pip = [str(unfinished / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *packages], check=True, timeout=INSTALL_SECONDS)
        unfinished.rename(self._folder)

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run Python with these arguments; return its output. Fail with its errors if it fails."""
        made = subprocess.run(
            [str(self._folder / "bin" / "python"), *words],
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
            env={**os.environ, **(env or {})},
        )
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout
