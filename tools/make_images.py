"""Build the container images with the installed builder: docker, podman or buildah (`make images`).

`tools/devcluster` calls `build_images` and uses OCI archives. Needs only the standard library; knows no Kubernetes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("operator", "gateway", "server", "server-slim")
CERTIFICATES = Path("/etc/ssl/certs")
PASSED_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "TORCH_INDEX_URL")
NO_BUILDER_MESSAGE = (
    "make images: no working image builder found. Tried docker (with a running engine), podman and buildah, "
    "in this order.\nInstall one of them (on Debian: apt-get install buildah) or name yours: make images BUILDER=podman"
)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """Images to build, and their names."""

    targets: tuple[str, ...]
    registry: str = "localhost"
    tag: str = "dev"  # `make images`: the version
    base: str | None = None  # None: the base that images/Dockerfile names
    archives: Path | None = None  # also write TARGET.tar (OCI) there; buildah and podman only

    def image_name(self, target: str) -> str:
        return f"{self.registry}/modelswarm/{target}:{self.tag}"


def find_builder() -> str | None:
    for name in ("docker", "podman", "buildah"):
        if shutil.which(name) is None:
            continue
        asked = [name, "version"] if name == "buildah" else [name, "info"]
        if subprocess.run(asked, capture_output=True, timeout=30).returncode == 0:
            return name
    return None


def build_command(builder: str, request: BuildRequest, target: str) -> list[str]:
    verb = {"docker": ["build"], "podman": ["build", "--layers"], "buildah": ["bud", "--layers"]}
    words = [builder, *verb[builder], f"--file={ROOT / 'images' / 'Dockerfile'}"]
    words += [f"--target={target}", f"--tag={request.image_name(target)}"]
    words += [f"--label=org.opencontainers.image.version={project_version()}"]
    words += [f"--label=org.opencontainers.image.revision={git_revision()}"]
    arguments = {name: os.environ[name] for name in PASSED_VARIABLES if os.environ.get(name)}
    if request.base is not None:
        arguments["BASE"] = request.base
    if builder == "docker":
        arguments.pop("PIP_CERT", None)  # a path of this machine, and docker mounts none
    else:
        words += _host_access_flags(builder)
    words += [f"--build-arg={name}={value}" for name, value in arguments.items()]
    return [*words, str(ROOT)]


def _host_access_flags(builder: str) -> list[str]:
    """Return flags that mount this machine's certificates and resolv.conf.

    So a build reaches a package index behind a company's proxy as this machine does.
    """
    words = [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"] if CERTIFICATES.is_dir() else []
    if (
        builder == "buildah"
    ):  # works without an engine, in a container and as root without namespaces
        words += ["--isolation=chroot", "--network=host"]
        words += ["--volume=/etc/resolv.conf:/etc/resolv.conf:ro"]
    return words


def project_version() -> str:
    number: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return number


def git_revision() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # a source archive without git


def build_images(builder: str, request: BuildRequest, log: int | None = None) -> dict[str, str]:
    """Build all targets; return target -> image name. `log`: file descriptor of the builder's output; None: stdout."""
    for target in request.targets:
        started = time.monotonic()
        subprocess.run(build_command(builder, request, target), check=True, stdout=log, stderr=log)
        if request.archives is not None:
            _write_archive(
                builder, request.image_name(target), request.archives / f"{target}.tar", log
            )
        print(f"{request.image_name(target)}: {time.monotonic() - started:.0f} s", flush=True)
    return {target: request.image_name(target) for target in request.targets}


def _write_archive(builder: str, name: str, path: Path, log: int | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an archive is never added to
    # Not compressed: for a cluster on this machine compression would only cost time.
    plain = ["--disable-compression"] if builder == "buildah" else []
    words = [builder, "push", *plain, name, f"oci-archive:{path}:{name}"]
    subprocess.run(words, check=True, stdout=log, stderr=log)


def parse_arguments(arguments: Sequence[str]) -> tuple[str | None, BuildRequest]:
    parser = argparse.ArgumentParser(description="Build ModelSwarm's container images.")
    parser.add_argument(
        "targets", nargs="*", help=f"any of {', '.join(TARGETS)}; default: the first three"
    )
    parser.add_argument(
        "--builder", default="", help="docker, podman or buildah; default: the first that works"
    )
    parser.add_argument("--registry", default="localhost", help="prefix of /modelswarm/TARGET")
    parser.add_argument("--tag", default="", help="default: the version in pyproject.toml")
    parser.add_argument("--base", default="", help="base image, Debian or alike with Python 3.11")
    parser.add_argument("--archives", type=Path, help="folder for OCI archives, TARGET.tar each")
    given = parser.parse_args(arguments)
    for target in given.targets:
        if target not in TARGETS:
            parser.error(f"{target!r} is none of {', '.join(TARGETS)}")
    if given.builder not in ("", "docker", "podman", "buildah"):
        parser.error(f"--builder: {given.builder!r} is none of docker, podman, buildah")
    if given.archives and given.builder == "docker":
        parser.error("--archives: docker writes none; use podman or buildah")
    tag = given.tag or project_version()
    request = BuildRequest(
        tuple(given.targets) or TARGETS[:3], given.registry, tag, given.base or None, given.archives
    )
    return given.builder or None, request


def main() -> int:
    builder, request = parse_arguments(sys.argv[1:])
    builder = builder or find_builder()
    if builder is None:
        print(NO_BUILDER_MESSAGE, file=sys.stderr)
        return 2
    print(
        f"building with {builder}: {', '.join(request.targets)} "
        "(about 5 minutes with their packages, one minute when only the project has changed)",
        flush=True,
    )
    try:
        build_images(builder, request)
    except subprocess.CalledProcessError as error:
        print(
            f"make images: {builder} failed ({error.returncode}); its output is above",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
