"""The parts of `tools/devcluster` that need no cluster: ports, the plan that `make cluster` announces, requirements."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.kubernetes.requirements import require

from tools.devcluster.build import packages, preparation
from tools.devcluster.build.build import CACHE_VARIABLE, find_part, part_folder
from tools.devcluster.network.ports import PORTS, free_ports


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the cluster's programs."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("cache")
def test_free_ports_are_unique_and_skip_taken_ones() -> None:
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first[-1] + 1)):
        later = free_ports(3)
    assert first[-1] + 1 not in later
    assert len({*first, *later}) == 6
    assert all(port in PORTS for port in (*first, *later))


def test_free_ports_wrap_around_after_the_last(cache: Path) -> None:
    (cache / "next-port").write_text(str(PORTS.stop - 1))
    assert PORTS.start <= min(free_ports(20)) < PORTS.start + 100


def test_plan_names_the_missing_parts(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require(packages.go_obstacles())
    wanted = preparation.Wanted({"nothing": str(cache)}, preparation.API_PARTS, images=False)
    found = preparation.plan(wanted)
    preparation.announce("make cluster", found, "start it")
    output = capsys.readouterr().err
    assert "about 5 min" in output
    assert "build from source, once: etcd, kube-api\n" in output
    assert "start it" in output
    assert "Debian" not in output

    for name in preparation.API_PARTS:
        part_folder(find_part(name)).mkdir(parents=True)
    preparation.announce("make cluster", preparation.plan(wanted), "start it")
    assert capsys.readouterr().err == "make cluster: everything is built; start it\n"


def test_uninstallable_packages_end_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")  # without apt-get
    with pytest.raises(packages.InstallError, match=r"apt-get install --yes .* runc nftables"):
        packages.check_installable(["runc", "nftables"])
    packages.check_installable([])


@pytest.mark.parametrize(
    ("required", "end"), [("1", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_missing_requirement_fails_or_skips(
    required: str, end: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUIRE_CLUSTER", required)
    with pytest.raises(end, match="Go is not installed"):
        require(["Go is not installed"])
    require([])
