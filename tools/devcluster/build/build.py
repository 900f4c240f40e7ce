"""The cluster's programs, built from their Go modules once and kept in a cache outside the tree.

Used by `preparation`, which builds several side by side, and by each part that starts a program (`program("etcd")`).
Each part is keyed by its own go.mod, go.sum, sources, flags and the Go version, so that a change of one never rebuilds
another. A part appears in the cache by one rename: an unfinished build never counts. Two processes that want the same
part wait for one another on a lock file. Knows nothing of what the programs do.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.devcluster.reporting import progress, set_details, tell

TOOLS = Path(__file__).resolve().parent.parent / "programs"
CACHE_VARIABLE = "MODELSWARM_CLUSTER_CACHE"
ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}


@dataclass(frozen=True, slots=True)
class Part:
    """The programs that one `go build` makes: some packages of one go.mod."""

    name: str
    folder: str  # under tools/devcluster/programs
    programs: dict[str, str]  # name of the program: Go package
    module: str = ""  # whose version is stamped
    stamps: tuple[str, ...] = ()  # Go variables; {version} {major} {minor}
    minutes: float = 1.0  # to build it alone on two cores with empty caches: an estimate for people


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


class BuildError(RuntimeError):
    """A program can't be built here; the message has the reason."""


def cache_folder() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "modelswarm-cluster"


def find_part(name: str) -> Part:
    for candidate in PARTS:
        if candidate.name == name:
            return candidate
    raise BuildError(f"{name}: no such part; there are {', '.join(p.name for p in PARTS)}")


def program_path(name: str) -> Path:
    """Return the path of a program, which is built now if it is not there yet."""
    for candidate in PARTS:
        if name in candidate.programs:
            return build_part(candidate) / name
    raise BuildError(f"{name}: no part builds this program")


def part_folder(wanted: Part) -> Path:
    return cache_folder() / f"{wanted.name}-{_key(wanted)}" / "bin"


def build_part(wanted: Part) -> Path:
    """Return the folder with the part's programs, which are built now if they are not there yet."""
    final = part_folder(wanted)
    if final.is_dir():
        return final
    with file_lock(final.parent):
        if not final.is_dir():
            _build_into(wanted, final.parent)
    return final


def version(module: str, folder: str) -> str:
    """Return the version of a module that a go.mod pins."""
    text = (TOOLS / folder / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s+{re.escape(module)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise BuildError(f"programs/{folder}/go.mod requires no {module}")
    return found.group(1)


@functools.cache
def _go_version() -> str:
    if shutil.which("go") is None:
        raise BuildError("Go is not installed: the cluster's programs are built from source")
    answer = subprocess.run(("go", "env", "GOVERSION"), capture_output=True, text=True, check=True)
    return answer.stdout.strip()


@functools.cache
def _key_of(name: str) -> str:
    wanted = find_part(name)
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
def file_lock(thing: Path) -> Iterator[None]:
    """Let one process at a time make that file or folder; the others wait."""
    lock = thing.with_name(f"{thing.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"{thing.name}: another process makes it; waiting")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build_into(wanted: Part, final: Path) -> None:
    """Build beside the final place and rename."""
    half = final.with_name(f".{final.name}.half")
    shutil.rmtree(half, ignore_errors=True)  # of a build that was killed; the lock is held
    (half / "bin").mkdir(parents=True)
    with progress(f"build {wanted.name}"):
        _go_build(wanted, half / "bin")
    half.rename(final)


def _go_build(wanted: Part, folder: Path) -> None:
    """One command for all programs of a part: shared packages are compiled once, and they are linked side by side."""
    named = all(package.endswith(f"/{name}") for name, package in wanted.programs.items())
    output = folder if named else folder / next(iter(wanted.programs))
    if not named and len(wanted.programs) > 1:
        raise BuildError(f"{wanted.name}: Go would give its programs other names")
    command = ["nice", "-n", "5", "go", "build", "-v", *_flags(wanted)]
    command += ["-o", f"{output}/" if named else str(output), *wanted.programs.values()]
    lines: list[str] = []
    modules = 0
    with subprocess.Popen(
        command,
        cwd=TOOLS / wanted.folder,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:  # -v names every package as it is compiled
            lines.append(line)
            modules += line.startswith("go: downloading")
            done = f"{modules} modules fetched, {len(lines) - modules} packages compiled"
            set_details(f"build {wanted.name}", done)
    if process.returncode != 0:
        raise BuildError(f"{wanted.name}: go build failed\n{''.join(lines[-20:])}")
