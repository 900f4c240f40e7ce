"""Build `.venv` of this tree: packages from a cache that all trees share, and an editable install of this tree.

The cache, `~/.cache/modelswarm/packages-KEY`, is a virtual environment with everything but this project. KEY is a hash
of constraints.txt, the dependencies in pyproject.toml, the version of Python and the package index of torch.
`.venv` is an environment of its own. Its packages are hard links to the cached files, so that it is there in seconds
and takes no space. pip and Python replace files and never write into them, so no tree can change another one.
Used by `make setup`, which all other verbs need. Needs nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelswarm"
VENV, STAMP = ROOT / ".venv", ROOT / ".venv" / ".installed"
OTHER_PATHS = re.compile(
    rb"%s/packages-[0-9a-f]+(\.new)?|%s\.new"
    % tuple(re.escape(str(path)).encode() for path in (CACHE, VENV))
)  # of an environment before it came into its place
KEPT = 3  # cached environments that no clean-up removes, the last used first
GIGABYTE = 10**9
NEEDED_GIGABYTES = {
    True: 4,
    False: 12,
}  # whether torch comes from TORCH_INDEX_URL; downloads included
PYTHON_LIBRARY = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    index = os.environ.get("TORCH_INDEX_URL", "")
    cached = CACHE / f"packages-{packages_key(project, index)}"
    wanted = f"{cached.name} {hash_of(project['project'], project['tool']['hatch'])}\n"
    if STAMP.exists() and STAMP.read_text() == wanted:
        STAMP.touch()
        return 0
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / f"{cached.name}.lock"):
        if not cached.is_dir():
            build(cached, project, index)
        os.utime(cached)
        assemble(cached, wanted)
    remove_old()
    return 0


def packages_key(project: dict[str, object], index: str) -> str:
    table = project["project"]
    assert isinstance(table, dict)
    wanted = [table["dependencies"], table["optional-dependencies"], project["dependency-groups"]]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return hash_of(constraints, wanted, sys.version, sys.base_prefix, index)


def hash_of(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Two trees that want the same environment build it once."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another tree builds {path.stem}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(cached: Path, project: dict[str, object], index: str) -> None:
    """Install all packages but this project into a folder that gets its name when it is complete."""
    if found := obstacle(has_ensurepip(), shutil.disk_usage(CACHE).free, bool(index)):
        sys.exit(found)
    print(f"installing the packages of constraints.txt into {cached} (about two minutes, once)")
    began = time.monotonic()
    unfinished = cached.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(unfinished)], check=True)
    pip = [
        str(unfinished / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
    ]
    run_pip([*pip, "--quiet", "--upgrade", "pip>=25.1"])
    constrained = [*pip, "--quiet", "-c", str(ROOT / "constraints.txt")]
    if index:
        run_pip([*constrained, "--index-url", index, "torch"])
    run_pip([*constrained, *requirements(project)])
    unfinished.rename(cached)
    print(f"installed in {time.monotonic() - began:.0f} s")


def has_ensurepip() -> bool:
    """Return whether `python -m venv` can make an environment with pip. Debian packages that part separately."""
    return importlib.util.find_spec("ensurepip") is not None


def obstacle(has_ensurepip: bool, free_bytes: int, has_index: bool) -> str:
    """Return the sentence that says why no environment can be built here, or an empty string."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not has_ensurepip:
        return (
            f"ModelSwarm needs the venv module of Python {version}, and {sys.executable} has none: "
            f"apt-get install python{version}-venv (Debian, Ubuntu), or set PYTHON=/path/to/python3"
        )
    needed = NEEDED_GIGABYTES[has_index]
    if free_bytes < needed * GIGABYTE:
        smaller = "" if has_index else ", or set TORCH_INDEX_URL to a CPU-only index (4 GB)"
        return (
            f"ModelSwarm's packages need {needed} GB of disk while they are installed, and {CACHE} has "
            f"{free_bytes / GIGABYTE:.1f} GB free: free some, or set XDG_CACHE_HOME to another disk{smaller}"
        )
    return ""


def run_pip(words: Sequence[str]) -> None:
    """Run a command of pip. If it fails, end with one sentence below pip's own lines."""
    code = subprocess.run(words, check=False).returncode
    if code:
        sys.exit(
            f"ModelSwarm's packages could not be installed: pip ended with code {code}, its reason is above. "
            "The package index must be reachable; the same `make` tries again"
        )


def requirements(project: dict[str, object]) -> list[str]:
    """The dependencies of every part, and the tools for development."""
    table, groups = project["project"], project["dependency-groups"]
    assert isinstance(table, dict) and isinstance(groups, dict)
    parts = [table["dependencies"], *table["optional-dependencies"].values(), *groups.values()]
    return sorted({requirement for part in parts for requirement in part})


def assemble(cached: Path, stamp: str) -> None:
    """Make the environment beside the old one and put it in its place at the end."""
    unfinished = VENV.with_name(".venv.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(unfinished)], check=True)
    link_tree(cached / PYTHON_LIBRARY, unfinished / PYTHON_LIBRARY)
    for script in (cached / "bin").iterdir():
        if not (unfinished / "bin" / script.name).exists():
            shutil.copy2(script, unfinished / "bin" / script.name, follow_symlinks=False)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    editable = ["--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run([str(unfinished / "bin" / "python"), *install, *editable], check=True)
    for file in [unfinished / "pyvenv.cfg", *(unfinished / "bin").iterdir()]:
        replace_paths(file)
    (unfinished / STAMP.name).write_text(stamp)
    old = VENV.with_name(".venv.old")
    shutil.rmtree(old, ignore_errors=True)
    if VENV.exists():
        VENV.rename(old)
    unfinished.rename(VENV)
    shutil.rmtree(old, ignore_errors=True)


def link_tree(source: Path, target: Path) -> None:
    """Hard links; copies where the cache is on another file system."""
    try:
        shutil.copytree(source, target, copy_function=os.link, symlinks=True, dirs_exist_ok=True)
    except shutil.Error:
        shutil.rmtree(target)
        print("copying the packages: the cache is on another file system")
        shutil.copytree(source, target, symlinks=True)


def replace_paths(file: Path) -> None:
    """Scripts name the environment that they were made in; binaries do not."""
    if file.is_symlink() or not file.is_file():
        return
    content = file.read_bytes()
    changed = OTHER_PATHS.sub(str(VENV).encode(), content).replace(b"(.venv.new)", b"(.venv)")
    if changed != content and b"\0" not in content[:1024]:
        file.write_bytes(changed)


def remove_old() -> None:
    """Hard links keep the files of trees whose cached environment is removed."""
    found = [path for path in CACHE.glob("packages-*") if path.is_dir() and path.suffix == ""]
    for path in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
