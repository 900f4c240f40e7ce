"""Write images/requirements/*.txt: the packages of each image, pinned by constraints.txt, with hashes (`make lock`).

The dependencies of each extra of pyproject.toml are read from the installed packages' metadata, without network. Only
the hashes come from the package index, through pip, for both processor architectures.
`tests/unit/repository/test_requirements.py` runs the first part: a dependency changed without `make lock` fails there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "images" / "requirements"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC_MINOR = 36  # of Debian 12, the newest glibc 2.x of the default base image
PYTHON = "3.11"

Pins = dict[str, str]  # canonical name -> version


def required_pins() -> dict[str, Pins]:
    """Return file name -> pins. torch and packages that only torch needs have their own file: slim images skip it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    base = project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    without_torch = [line for line in extras["serving"] if Requirement(line).name != "torch"]
    server = resolve_closure([*base, *without_torch])
    torch = resolve_closure(["torch"])
    return {
        "build": resolve_closure(project["build-system"]["requires"]),
        "gateway": resolve_closure([*base, *extras["gateway"]]),
        "operator": resolve_closure([*base, *extras["operator"]]),
        "server": server,
        "torch": {name: torch[name] for name in torch if name not in server},
    }


def resolve_closure(lines: Iterable[str]) -> Pins:
    """Return the installed versions of all packages that `lines` require, directly or not."""
    pins: Pins = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(line), "") for line in lines]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted_extra in {"", *requirement.extras} - {e for n, e in seen if n == name}:
            seen.add((name, wanted_extra))
            found = distribution(name)
            pins[name] = found.version
            waiting += [(Requirement(line), wanted_extra) for line in found.requires or ()]
    return pins


def read_constraints() -> Pins:
    pairs = (line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    return {canonicalize_name(name): version for name, version in pairs}


def read_pins(name: str) -> Pins:
    """Return the pins now in images/requirements/NAME.txt."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    pairs = (line.split()[0].split("==") for line in lines if "==" in line)
    return {canonicalize_name(left): right for left, right in pairs}


def fetch_hashes(pins: Pins) -> dict[str, list[str]]:
    """Return the sha256 sums of the wheels that pip would install, one per architecture."""
    found: dict[str, set[str]] = {name: set() for name in pins}
    for machine in ARCHITECTURES:
        for entry in _pip_report(pins, machine):
            found[canonicalize_name(entry["metadata"]["name"])].add(
                entry["download_info"]["archive_info"]["hashes"]["sha256"]
            )
    return {name: sorted(sums) for name, sums in found.items()}


def _pip_report(pins: Pins, machine: str) -> list[Any]:
    """Return the packages of pip's installation report for one architecture (a dry run)."""
    platforms = [f"manylinux2014_{machine}"]
    platforms += [f"manylinux_2_{minor}_{machine}" for minor in range(5, GLIBC_MINOR + 1)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--only-binary=:all:", f"--python-version={PYTHON}"]
        command += [f"--target={folder}/none", f"--report={report}"]
        command += [f"--platform={platform}" for platform in platforms]
        command += [f"{name}=={version}" for name, version in pins.items()]
        subprocess.run(command, check=True)
        entries: list[Any] = json.loads(report.read_text())["install"]
        return entries


def render_requirements(pins: Pins, sums: dict[str, list[str]]) -> str:
    lines = [
        "# Written by `make lock` (tools/make_requirements.py) from pyproject.toml and constraints.txt."
    ]
    for name in sorted(pins):
        lines.append(f"{name}=={pins[name]} \\")
        lines.append(" \\\n".join(f"    --hash=sha256:{value}" for value in sums[name]))
    return "\n".join(lines) + "\n"


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, pins in required_pins().items():
        (FOLDER / f"{name}.txt").write_text(render_requirements(pins, fetch_hashes(pins)))
        print(f"images/requirements/{name}.txt: {len(pins)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
