"""A bare Debian in namespaces of its own, for the newcomer's walk.

The root file system comes from debootstrap: no Python, no make, no cache of this machine. Only its package mirrors'
settings are passed on. Needs Linux, root, debootstrap and unshare; knows nothing of the README.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

HERE = Path(__file__).resolve().parent
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SETTINGS = (  # of this machine's mirrors; everything else of its environment stays outside
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT"),
    *("TORCH_INDEX_URL", "http_proxy", "https_proxy", "no_proxy"),
)
USER, USER_ID = "newcomer", 1000
HOME = Path("/home") / USER
CLONE = HOME / "modelswarm"
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SECONDS_TO_START = 60.0
NEEDED_PROGRAMS = ("debootstrap", "unshare", "nsenter", "chroot", "git")


def obstacles() -> list[str]:
    """Return why no container can be made here, one sentence each."""
    if not sys.platform.startswith("linux"):
        return [f"Linux is needed for namespaces, and this is {sys.platform}"]
    found = [] if os.geteuid() == 0 else ["not root: namespaces and mounts can't be made"]
    missing = [name for name in NEEDED_PROGRAMS if shutil.which(name) is None]
    if missing:
        found.append(f"missing programs: {', '.join(missing)} (apt-get install them)")
    return found


def make_root(root: Path, suite: str, packages: Sequence[str]) -> None:
    """Make a Debian of the essential packages and `packages`, with a user who is not root."""
    alone = ("unshare", "--mount", "--propagation", "private")  # debootstrap leaves /proc mounted
    included = f"--include={','.join(packages)}"
    done = subprocess.run(
        (*alone, "debootstrap", "--variant=minbase", included, suite, root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError("debootstrap failed:\n" + "\n".join(done.stdout.splitlines()[-20:]))
    accounts = {
        "passwd": f"{USER}:x:{USER_ID}:{USER_ID}::{HOME}:/bin/bash\n",
        "group": f"{USER}:x:{USER_ID}:\n",
    }
    for name, line in accounts.items():
        with (root / "etc" / name).open("a", encoding="utf-8") as file:
            file.write(line)
    (root / "etc/apt/apt.conf.d/99newcomer").write_text(
        'APT::Get::Assume-Yes "true";\nAPT::Install-Recommends "false";\nDpkg::Use-Pty "0";\n'
    )
    for name in ("resolv.conf", "hosts"):
        shutil.copy(Path("/etc") / name, root / "etc" / name)
    if CERTIFICATES.exists() and (root / "etc/ssl/certs").is_dir():
        shutil.copy(CERTIFICATES, inside(root, CERTIFICATES))
    inside(root, HOME).mkdir(mode=0o755)
    os.chown(inside(root, HOME), USER_ID, USER_ID)


def copy_clone(source: Path, root: Path) -> str:
    """Clone the committed tree of `source` into the user's home; return its commit."""
    target = inside(root, CLONE)
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(("git", "clone", "--quiet", "--no-hardlinks", source, target), check=True)
    subprocess.run(("chown", "--recursive", f"{USER_ID}:{USER_ID}", target), check=True)
    owned = ("git", "-c", f"safe.directory={target}", "-C", target)
    described = subprocess.run(
        (*owned, "log", "-1", "--format=%h %s"), capture_output=True, text=True, check=True
    )
    return described.stdout.strip()


def read_committed(source: Path, name: str) -> str:
    """Return a file's committed text, which is what a clone has."""
    command = ("git", "-C", source, "show", f"HEAD:{name}")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def inside(root: Path, path: Path) -> Path:
    """Return the place outside of an absolute path of the container."""
    return root / path.relative_to("/")


class Container:
    """Processes, mounts and, without `network`, sockets apart from this machine. All processes end with it."""

    def __init__(self, root: Path, network: bool = True) -> None:
        self.root, self._network = root, network

    def __enter__(self) -> Self:
        kinds = ["--mount", "--pid", "--ipc", "--uts", *([] if self._network else ["--net"])]
        holder = (sys.executable, HERE / "holder.py", self.root)
        self._process = subprocess.Popen(
            ("unshare", "--fork", "--kill-child", "--propagation", "private", *kinds, *holder),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RuntimeError("the container did not start; its error is above")
        self._first = self._find_first()
        namespaces = [f"--target={self._first}", *kinds]
        self._enter = ("nsenter", *namespaces)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + SECONDS_TO_START
        while Path(f"/proc/{self._first}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _find_first(self) -> int:
        """Return the process with the id 1 of the container, as this machine numbers it."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        return int(children.split()[0])

    def words(self, command: str, as_root: bool = False) -> tuple[str, ...]:
        """Return the command of this machine that runs a line of shell in the clone, and takes over its terminal.

        So Ctrl-C reaches the programs inside only, not `nsenter`.
        """
        user = "0:0" if as_root else f"{USER_ID}:{USER_ID}"
        where = f"cd {CLONE} && {command}"
        change = ("setsid", "--ctty", "chroot", f"--userspec={user}", str(self.root))
        return (*self._enter, *change, "/bin/bash", "-c", where)

    def processes(self) -> list[str]:
        """Return the command lines of all processes in the container but the first."""
        done = subprocess.run(
            (*self._enter, "chroot", str(self.root), "/bin/bash", "-c", LIST_PROCESSES),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()


# The shell that lists has an id of its own, and so has no line here.
LIST_PROCESSES = (
    "for each in /proc/[0-9]*; do pid=${each#/proc/}; [ $pid = 1 ] || [ $pid = $$ ] || "
    "{ read -r -d '' line < $each/cmdline; echo \"$pid $line\"; }; done 2>/dev/null; true"
)


def environment_inside(as_root: bool = False) -> Mapping[str, str]:
    """Return the environment of a person's shell in the container, with this machine's mirrors."""
    kept = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    return {
        **kept,
        "PIP_CERT": str(CERTIFICATES),
        "SSL_CERT_FILE": str(CERTIFICATES),
        "HOME": "/root" if as_root else str(HOME),
        "USER": "root" if as_root else USER,
        "PATH": PATHS,
        "TERM": "xterm-256color",
    }
