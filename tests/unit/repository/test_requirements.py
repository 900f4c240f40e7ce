"""images/requirements pins the dependencies of pyproject.toml to the versions of constraints.txt. Needs no network.

The packages of pyproject.toml tell type checkers that they have types, and the images of servers find a driver.
"""

from __future__ import annotations

import tomllib
from itertools import takewhile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.make_requirements import FOLDER, read_constraints, read_pins, required_pins

ROOT = Path(__file__).resolve().parents[3]
NAMES = sorted(required_pins())


@pytest.mark.parametrize("name", NAMES)
def test_image_requirements_equal_the_locked_versions(name: str) -> None:
    """`make lock` writes them after a change of a dependency."""
    assert read_pins(name) == required_pins()[name]
    locked = read_constraints()
    for package, version in read_pins(name).items():
        assert locked.get(package, version) == version  # pip freeze omits setuptools


@pytest.mark.parametrize("name", NAMES)
def test_every_package_is_pinned_by_hash(name: str) -> None:
    blocks = (FOLDER / f"{name}.txt").read_text().split("==")[1:]
    assert len(blocks) == len(read_pins(name))
    for block in blocks:
        assert "--hash=sha256:" in block


def test_oldest_grpc_and_protobuf_load_the_generated_code() -> None:
    """`make proto` with newer tools raises what the generated code asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    oldest = {
        wanted.name: str(wanted.specifier).removeprefix(">=")
        for wanted in map(Requirement, project["project"]["dependencies"])
    }
    folder = ROOT / "modelswarm" / "protocol" / "wire"
    stubs = (folder / "api_pb2_grpc.py").read_text("utf-8")
    assert f"GRPC_GENERATED_VERSION = '{oldest['grpcio']}'" in stubs
    for file in folder.glob("*_pb2.py"):
        code = file.read_text("utf-8")
        assert f"# Protobuf Python Version: {oldest['protobuf']}\n" in code


def test_operator_and_gateway_requirements_have_no_torch() -> None:
    for name in ("operator", "gateway"):
        assert not {"torch", "transformers", "triton"} & read_pins(name).keys()


def test_server_requirements_without_torch_have_no_cuda() -> None:
    assert not [
        p for p in read_pins("server") if p.startswith(("nvidia-", "cuda-", "torch", "triton"))
    ]
    assert not read_pins("server").keys() & read_pins("torch").keys()


@pytest.mark.parametrize("target", ["server", "server-slim"])
def test_server_image_finds_the_driver_that_gke_mounts(target: str) -> None:
    lines = (ROOT / "images" / "Dockerfile").read_text("utf-8").replace("\\\n", " ").splitlines()
    start = next(at for at, line in enumerate(lines) if line == f"FROM runtime AS {target}")
    stage = takewhile(lambda line: not line.startswith("FROM "), lines[start + 1 :])
    variables = [word for line in stage if line.startswith("ENV ") for word in line.split()[1:]]
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64" in variables


def test_every_package_tells_type_checkers_of_its_types() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert len(packages) == 4
    assert [each for each in packages if not (ROOT / each / "py.typed").is_file()] == []
