"""The cluster's programs, built from their Go modules once and kept in a cache outside the tree.

Used by `python -m tools.devcluster build` and by whatever starts a program (`program("etcd")`). Each part is keyed
by its own go.mod, go.sum, sources, flags and the Go version, so that a change of one never rebuilds another. A part
appears in the cache by one rename: a half build never counts. Callers at the same time wait for one another on a
lock file.
Knows nothing of what the programs do.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / "programs"
CACHE_VARIABLE = "MODELSWARM_CLUSTER_CACHE"
ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
SAY_EVERY = 15.0  # seconds between two progress lines where there is no terminal


@dataclass(frozen=True, slots=True)
class Part:
    """What one `go build` makes: some packages of one go.mod."""

    name: str
    folder: str  # under tools/devcluster/programs
    programs: dict[str, str]  # name of the program: Go package
    module: str = ""  # whose version is stamped
    stamps: tuple[str, ...] = ()  # Go variables; {version} {major} {minor}
    minutes: float = 1.0  # cold, on two cores; only said


KUBE = "k8s.io/kubernetes"
KUBE_STAMPS = (
    "k8s.io/component-base/version.gitVersion={version}",
    "k8s.io/component-base/version.gitMajor={major}",
    "k8s.io/component-base/version.gitMinor={minor}",
    "k8s.io/component-base/version.gitTreeState=clean",
    "k8s.io/client-go/pkg/version.gitVersion={version}",
)
CONTAINERD = "github.com/containerd/containerd/v2"


def _kube(name: str, minutes: float, *programs: str) -> Part:
    packages = {program: f"{KUBE}/cmd/{program}" for program in programs}
    return Part(name, "kube", packages, KUBE, KUBE_STAMPS, minutes)


PARTS = (
    Part("etcd", "etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    _kube("kube-api", 5, "kube-apiserver", "kubectl"),
    _kube("kube-control", 2, "kube-controller-manager", "kube-scheduler"),
    Part(
        "kwok",
        "kwok",
        {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
        "sigs.k8s.io/kwok",
        ("sigs.k8s.io/kwok/pkg/consts.Version={version}",),
        2,
    ),
    Part(
        "helm",
        "helm",
        {"helm": "helm.sh/helm/v4/cmd/helm"},
        "helm.sh/helm/v4",
        ("helm.sh/helm/v4/internal/version.version={version}",),
        2.5,
    ),
    _kube("kube-node", 2, "kubelet", "kube-proxy"),
    Part(
        "containerd",
        "containerd",
        {
            program: f"{CONTAINERD}/cmd/{program}"
            for program in ("containerd", "ctr", "containerd-shim-runc-v2")
        },
        CONTAINERD,
        (CONTAINERD + "/version.Version={version}",),
        2,
    ),
    Part("coredns", "coredns", {"coredns": "github.com/coredns/coredns"}, minutes=3),
    Part("pause", "pause", {"pause": "."}, minutes=0.1),
)
API_LEVEL = ("etcd", "kube-api")


class CannotBuild(RuntimeError):
    """A program can't be made here; the message says why."""


def cache_folder() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "modelswarm-cluster"


def part(name: str) -> Part:
    for candidate in PARTS:
        if candidate.name == name:
            return candidate
    raise CannotBuild(f"{name}: no such part; there are {', '.join(p.name for p in PARTS)}")


def program(name: str) -> Path:
    """Where a program lies, built now if it is not there yet."""
    for candidate in PARTS:
        if name in candidate.programs:
            return build(candidate) / name
    raise CannotBuild(f"{name}: no part builds this program")


def folder_of(wanted: Part) -> Path:
    return cache_folder() / f"{wanted.name}-{_key(wanted)}" / "bin"


def build(wanted: Part) -> Path:
    """The folder with the part's programs."""
    final = folder_of(wanted)
    if final.is_dir():
        return final
    with locked(final.parent):
        if not final.is_dir():
            _build_into(wanted, final.parent)
    return final


def version(module: str, folder: str) -> str:
    """The version that a go.mod pins."""
    text = (TOOLS / folder / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s+{re.escape(module)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise CannotBuild(f"programs/{folder}/go.mod requires no {module}")
    return found.group(1)


@functools.cache
def _go_version() -> str:
    if shutil.which("go") is None:
        raise CannotBuild("Go is not installed: the cluster's programs are built from source")
    answer = subprocess.run(("go", "env", "GOVERSION"), capture_output=True, text=True, check=True)
    return answer.stdout.strip()


@functools.cache
def _key_of(name: str) -> str:
    wanted = part(name)
    digest = hashlib.sha256(f"{_go_version()}\n{ENVIRONMENT}\n{_flags(wanted)}\n".encode())
    for file in sorted((TOOLS / wanted.folder).iterdir()):
        if file.suffix in (".mod", ".sum", ".go"):
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _key(wanted: Part) -> str:
    return _key_of(wanted.name)


def _flags(wanted: Part) -> list[str]:
    link = ["-s", "-w"]
    if wanted.stamps:
        stamped = version(wanted.module, wanted.folder)
        major, minor = stamped.lstrip("v").split(".")[:2]
        for stamp in wanted.stamps:
            link += ["-X", stamp.format(version=stamped, major=major, minor=minor)]
    return ["-ldflags", " ".join(link)]


@contextmanager
def locked(thing: Path) -> Iterator[None]:
    """One process at a time makes what shall lie there; the others wait."""
    lock = thing.with_name(f"{thing.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{thing.name}: another process makes it; waiting")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build_into(wanted: Part, final: Path) -> None:
    """Build beside the final place and rename: only whole parts are ever seen."""
    half = final.with_name(f".{final.name}.half")
    shutil.rmtree(half, ignore_errors=True)  # of a build that was killed; the lock is ours
    (half / "bin").mkdir(parents=True)
    started = time.monotonic()
    _say(
        f"{wanted.name}: building from source (about {wanted.minutes:g} min when nothing is cached)"
    )
    for name, package in wanted.programs.items():
        _go_build(wanted, half / "bin" / name, package, started)
    half.rename(final)
    _say(f"{wanted.name}: built in {time.monotonic() - started:.0f} s")


def _go_build(wanted: Part, output: Path, package: str, started: float) -> None:
    command = ["nice", "-n", "5", "go", "build", "-v", *_flags(wanted), "-o", str(output), package]
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=TOOLS / wanted.folder,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = started
        for line in process.stderr:  # -v names every package as it is compiled
            lines.append(line)
            said = _progress(f"{wanted.name}: {output.name}", len(lines), started, said)
    if process.returncode != 0:
        raise CannotBuild(f"{wanted.name}: go build {package} failed\n{''.join(lines[-20:])}")


def _progress(what: str, packages: int, started: float, said: float) -> float:
    now = time.monotonic()
    terminal = sys.stderr.isatty()
    if now - said < (0.5 if terminal else SAY_EVERY):
        return said
    line = f"{what}: {packages} packages compiled, {now - started:.0f} s"
    print(
        f"\r{line}\033[K" if terminal else line,
        end="" if terminal else "\n",
        file=sys.stderr,
        flush=True,
    )
    return now


def _say(line: str) -> None:
    lead = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{lead}{line}", file=sys.stderr, flush=True)
