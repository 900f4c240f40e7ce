"""The parts of `tools/devcluster` that need no cluster: ports, the announced plan of `make cluster`, requirements."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from support.kubernetes.requirements import require
from support.processes.programs.browser import chromium

from tools.devcluster import __main__ as command_line
from tools.devcluster.build import packages, preparation, torch_packages
from tools.devcluster.build.build import CACHE_VARIABLE, find_part, part_folder
from tools.devcluster.network import ports
from tools.devcluster.network.ports import free_ports


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of the cluster's programs."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def own_ports(cache: Path, monkeypatch: pytest.MonkeyPatch) -> range:
    """Return a range of which no cluster has ports: one that runs now may use all others."""
    start = ports.PORTS.stop + os.getpid() % 2000
    found = range(start, start + 100)
    monkeypatch.setattr(ports, "PORTS", found)
    return found


def test_free_ports_are_unique_and_skip_taken_ones(own_ports: range) -> None:
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first[-1] + 1)):
        later = free_ports(3)
    assert first[-1] + 1 not in later
    assert len({*first, *later}) == 6
    assert all(port in own_ports for port in (*first, *later))


def test_free_ports_wrap_around_after_the_last(cache: Path, own_ports: range) -> None:
    (cache / "next-port").write_text(str(own_ports.stop - 1))
    assert own_ports.start <= min(free_ports(20)) < own_ports.start + 50


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


@pytest.mark.parametrize(("python", "downloads"), [("3.11", False), ("3.12", True)])
def test_torch_is_downloaded_for_the_python_of_the_images(
    cache: Path, monkeypatch: pytest.MonkeyPatch, python: str, downloads: bool
) -> None:
    """Ubuntu has another Python: its torch ended every server pod with an ImportError."""
    monkeypatch.setattr(torch_packages, "OWN_PYTHON", python)
    found = preparation.plan(preparation.Wanted({}, (), images=True))
    line = "download torch for Python 3.11, which the images have (5 GB)"
    assert (found.torch, line in found.lines()) == (downloads, downloads)


@pytest.fixture
def macos(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate another operating system: no /proc, no apt-get, no Go."""
    monkeypatch.setattr(packages, "PLATFORM", "darwin")
    monkeypatch.setattr(packages, "FILESYSTEMS", cache / "absent")
    monkeypatch.setattr(packages, "CONTROL_GROUPS", cache / "absent")
    monkeypatch.setattr(packages, "API_PACKAGES", {"openssl": str(cache / "absent")})
    monkeypatch.setenv("PATH", "")
    return cache


@pytest.fixture
def no_openssl(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate Linux with Go, without openssl and without a way to install it."""
    wanted = {"openssl": str(cache / "absent")}
    for name in ("API_LEVEL", "API_TESTS", "TESTS"):
        lacking = preparation.Wanted(wanted, preparation.API_PARTS, images=False)
        monkeypatch.setattr(command_line, name, lacking)
    programs = cache / "programs"
    programs.mkdir()
    go = programs / "go"
    go.write_text("#!/bin/sh\necho go version go1.24.0 linux/amd64\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    return cache


def run_verb(monkeypatch: pytest.MonkeyPatch, *words: str, required: str = "") -> str | None:
    """Run a command of devcluster; return the text of its exit, or None if it succeeds."""
    monkeypatch.delenv("CLUSTER", raising=False)
    monkeypatch.setenv("REQUIRE_CLUSTER", required)
    monkeypatch.setattr(sys, "argv", ["devcluster", *words])
    try:
        command_line.main()
    except SystemExit as end:
        return str(end.code)
    return None


@pytest.mark.parametrize("api_only", [(), ("--api-only",)])
def test_up_on_macos_names_linux_and_fails(
    macos: Path, monkeypatch: pytest.MonkeyPatch, api_only: tuple[str, ...]
) -> None:
    end = run_verb(monkeypatch, "up", "--state", str(macos / "state"), *api_only)
    assert end is not None and "\nLinux is needed: " in end
    assert "this is darwin" in end and len(end.splitlines()) == 2
    assert not (macos / "state").exists()


def test_prepare_on_macos_names_skipped_tests(
    macos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb(monkeypatch, "prepare") is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "on real nodes will be skipped: Linux is needed: " in lines[0]
    assert list(macos.iterdir()) == []


def test_prepare_without_a_browser_names_its_tests(
    no_openssl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = {"chromium": str(no_openssl / "chromium")}
    monkeypatch.setattr(packages, "BROWSER_PACKAGES", missing)
    assert run_verb(monkeypatch, "prepare") is None
    assert "browser" not in capsys.readouterr().err
    assert run_verb(monkeypatch, "prepare", "--browser") is None
    text = capsys.readouterr().err
    assert "tests of the page in a browser will be skipped: missing programs: chromium" in text
    end = run_verb(monkeypatch, "prepare", "--browser", required="1")
    assert end is not None and "\nmissing programs: chromium" in end


@pytest.mark.parametrize(
    ("required", "end"), [("1", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_missing_browser_fails_or_skips(
    required: str, end: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("REQUIRE_CLUSTER", required)
    with pytest.raises(end, match="no Chromium is installed"), chromium(tmp_path, 1):
        pass


def test_prepare_on_macos_fails_if_cluster_is_required(
    macos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = run_verb(monkeypatch, "prepare", required="1")
    assert end is not None and end.startswith("REQUIRE_CLUSTER=1")
    assert "Linux is needed: " in end and not list(macos.iterdir())


@pytest.mark.usefixtures("macos")
def test_obstacles_on_macos_are_linux_alone() -> None:
    assert packages.obstacles() == packages.api_obstacles() == packages.platform_obstacles()
    assert len(packages.obstacles()) == 1


def test_prepare_without_openssl_builds_nothing(
    no_openssl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb(monkeypatch, "prepare") is None
    text = capsys.readouterr().err
    assert (
        "tests of the Kubernetes API and on real nodes will be skipped: missing programs: " in text
    )
    assert "build from source" not in text
    assert [each.name for each in no_openssl.iterdir()] == ["programs"]


def test_uninstallable_packages_name_debian_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # without apt-get
    with pytest.raises(packages.InstallError, match="Debian or Ubuntu is needed") as refusal:
        packages.check_installable(["runc", "nftables"])
    assert "runc (/usr/sbin/runc), nftables (/usr/sbin/nft)" in str(refusal.value)
    assert "as root" not in str(refusal.value)
    packages.check_installable([])


def test_packages_without_root_end_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt_get = tmp_path / "apt-get"
    apt_get.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(packages.InstallError, match=r"as root: apt-get install --yes .* runc"):
        packages.check_installable(["runc"])


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
