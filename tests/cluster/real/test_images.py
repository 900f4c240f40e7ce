"""The project's own images, built by `make images`: small, without foreign packages, run as 65532.

Reads the archives that the test cluster imports, and runs their programs as the kubelet does.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.kubernetes.requirements import require

from tools import make_images
from tools.devcluster.build.packages import obstacles
from tools.devcluster.build.project_images import project_archives

pytestmark = pytest.mark.full

MIB = 2**20
BOUNDS = {"operator": 320 * MIB, "gateway": 430 * MIB, "server-slim": 470 * MIB}  # bytes, unpacked
SITE = "opt/modelswarm/lib/python3.11/site-packages"
TARGETS = pytest.mark.parametrize("target", list(BOUNDS))
FOREIGN = {
    "operator": ("torch", "transformers", "numpy", "fastapi", "pip", "setuptools"),
    "gateway": ("torch", "transformers", "kopf", "pip", "setuptools"),
    "server-slim": ("torch", "triton", "nvidia", "fastapi", "kopf", "kubernetes", "pip"),
}


@dataclass(frozen=True, slots=True)
class Image:
    archive: Path
    config: dict[str, dict[str, object]]
    files: dict[str, tarfile.TarInfo]  # of all layers, without files that a later layer removes

    @property
    def size(self) -> int:
        return sum(member.size for member in self.files.values() if member.isfile())


@pytest.fixture(scope="module")
def images() -> dict[str, Image]:
    require(obstacles())
    return {archive.stem: read(archive) for archive in project_archives()}


def read(archive: Path) -> Image:
    files: dict[str, tarfile.TarInfo] = {}
    with tarfile.open(archive) as outer:

        def blob(digest: str) -> bytes:
            member = outer.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert member is not None
            return member.read()

        index = outer.extractfile("index.json")
        assert index is not None
        manifest = json.loads(blob(json.load(index)["manifests"][0]["digest"]))
        config = json.loads(blob(manifest["config"]["digest"]))
        for layer in manifest["layers"]:
            data = outer.extractfile(f"blobs/{layer['digest'].replace(':', '/')}")
            assert data is not None
            with gzip.open(data) as plain, tarfile.open(fileobj=plain, mode="r|") as inner:
                for member in inner:
                    files[member.name.removeprefix("./")] = member
    return Image(archive, config, files)


@TARGETS
def test_image_is_small_and_runs_as_65532(images: dict[str, Image], target: str) -> None:
    image = images[target]
    print(f"{target}: {image.size / MIB:.0f} MiB, {image.archive.stat().st_size / MIB:.0f} packed")
    assert image.size < BOUNDS[target]
    config = image.config["config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == [f"modelswarm-{target.removesuffix('-slim')}"]
    labels = config["Labels"]
    assert isinstance(labels, dict)
    assert labels["org.opencontainers.image.version"] == make_images.project_version()
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


@TARGETS
def test_image_holds_no_foreign_package(images: dict[str, Image], target: str) -> None:
    image = images[target]
    for name in FOREIGN[target]:
        assert f"{SITE}/{name}" not in image.files, name
    assert not [name for name in image.files if name.startswith("opt/torch")]
    assert not [name for name in image.files if name.endswith((".so.13", "bin/gcc"))]


@TARGETS
def test_image_is_compiled_and_has_the_demo_model(images: dict[str, Image], target: str) -> None:
    files = images[target].files
    assert any(name.startswith(f"{SITE}/modelswarm/demo/counting/") for name in files)
    assert any(
        name.startswith(f"{SITE}/modelswarm/demo/") and name.endswith(".safetensors")
        for name in files
    )
    sources = [
        name for name in files if name.startswith(f"{SITE}/modelswarm") and name.endswith(".py")
    ]
    assert len(sources) > 50
    for name in sources:
        folder, _, file = name.rpartition("/")
        assert f"{folder}/__pycache__/{file.removesuffix('.py')}.cpython-311.pyc" in files


@TARGETS
def test_image_user_can_write_nothing_outside_tmp(images: dict[str, Image], target: str) -> None:
    for name, member in images[target].files.items():
        if member.issym() or name.startswith(("tmp", "var/tmp", "var/lock", "run/lock")):
            continue
        assert member.uid != 65532, name
        if name.startswith("opt/"):
            assert not member.mode & 0o022, name


class Container:
    """A working container of buildah, in its own store."""

    def __init__(self, store: Path) -> None:
        self._store = ("buildah", "--root", str(store / "store"), "--runroot", str(store / "run"))
        self._name = ""

    def start(self, archive: Path) -> Container:
        name = f"test-{uuid.uuid4().hex[:8]}"
        self._run("from", "--name", name, f"oci-archive:{archive}", check=True)
        self._name = name
        return self

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run("run", "--isolation", "chroot", self._name, "--", *words, check=False)

    def remove(self) -> None:
        self._run("rm", "--all", check=True)
        self._run("rmi", "--all", check=True)

    def _run(self, *words: str, check: bool) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (*self._store, *words), capture_output=True, text=True, timeout=200, check=check
        )


@pytest.fixture(scope="module")
def containers(
    images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Container]]:
    stores = {target: tmp_path_factory.mktemp(target) for target in images}
    running = {t: Container(stores[t]).start(images[t].archive) for t in images}
    yield running
    for container in running.values():
        container.remove()
    for store in stores.values():
        shutil.rmtree(store)


@TARGETS
def test_program_starts_as_65532_and_names_missing_flags(
    containers: dict[str, Container], target: str
) -> None:
    run, program = containers[target], f"modelswarm-{target.removesuffix('-slim')}"
    assert run("id", "-u").stdout.strip() == "65532"
    helped = run(program, "--help")
    assert helped.returncode == 0, helped.stderr
    assert "Usage" in helped.stdout
    careless = run(program)
    assert careless.returncode == 2
    (sentence,) = [line for line in careless.stderr.splitlines() if line.startswith(program)]
    assert "--" in sentence
    assert run("touch", "/opt/modelswarm/x").returncode != 0


def test_server_without_torch_reports_its_search_path(
    containers: dict[str, Container],
) -> None:
    run = containers["server-slim"]
    started = run(
        "modelswarm-server", "--model", "demo://counting", "--blocks", "0:4", "--name", "s",
        "--discovery-dir", "/tmp",
    )  # fmt: skip
    assert started.returncode == 2
    assert "modelswarm-server: torch is not installed" in started.stderr
    assert "/opt/torch" in started.stderr
    assert "Traceback" not in started.stderr


def test_make_images_without_a_builder_reports_the_remedy(tmp_path: Path) -> None:
    tool = Path(make_images.__file__)
    done = subprocess.run(
        (sys.executable, str(tool)), env={"PATH": str(tmp_path)}, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "docker" in done.stderr
    assert "apt-get install buildah" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_builder_gets_the_same_image_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example.com/simple")
    request = make_images.BuildRequest(
        ("gateway",), "registry.example.com/ai", "1.2.3", "debian-like:1"
    )
    for builder in ("docker", "podman", "buildah"):
        words = make_images.build_command(builder, request, "gateway")
        assert "--tag=registry.example.com/ai/modelswarm/gateway:1.2.3" in words
        assert "--build-arg=BASE=debian-like:1" in words
        assert "--build-arg=PIP_INDEX_URL=https://packages.example.com/simple" in words
    assert "--isolation=chroot" not in make_images.build_command("docker", request, "gateway")
