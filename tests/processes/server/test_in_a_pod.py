"""A server as in a pod: no members folder, no home, probes on the metrics port, an advertised address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.eventually import eventually
from support.models.tiny_models import make_model
from support.processes.link_peers import Node, hello

from modelswarm.protocol.identity import Address
from tools.devcluster.network.ports import free_ports

pytestmark = pytest.mark.full

HASH = ("--hash-model", "--pages", "64")


class Pod:
    """A server process with the flags that the operator gives it."""

    def __init__(
        self, *flags: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> None:
        self.page, self.links = (f"127.0.0.1:{port}" for port in free_ports(2))
        command = [*prefix, sys.executable, "-m", "modelswarm_serving", "--blocks", "0:4"]
        command += ["--listen", self.links, "--metrics", self.page]
        command += ["--name", "p", "--incarnation", "3", *flags]
        env = env or {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def ask(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.page}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_ready(self) -> None:
        eventually("it is ready", lambda: self.ask("/ready")[0] == 200, 120)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return exit code and stderr."""
        _, output = self.process.communicate(timeout=300)
        return self.process.returncode, output


@contextmanager
def running(
    *flags: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Iterator[Pod]:
    pod = Pod(*flags, prefix=prefix, env=env)
    try:
        yield pod
    finally:
        pod.process.kill()
        pod.process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_loading_server_is_live_and_gives_its_reason(model: Path) -> None:
    with running("--model", f"file://{model}") as pod:
        eventually("the page is open", lambda: pod.ask("/live")[0] == 200)
        status, body = pod.ask("/ready")
        told = json.loads(body)
        assert (status, told["status"], told["phase"]) == (503, "starting", "importing")
        assert told.keys() == {"status", "phase", "done", "total", "reason"}
        assert pod.ask("/metrics")[0] == 200
        pod.wait_ready()
        assert pod.ask("/live")[0] == 200
        eventually("metrics", lambda: "modelswarm_server_kv_pages" in pod.ask("/metrics")[1])
        assert pod.ask("/secret")[0] == 404
        pod.process.send_signal(signal.SIGTERM)
        assert pod.end()[0] == 0


async def test_hello_carries_the_advertised_address() -> None:
    with running(*HASH, "--advertise", "pod.example:7000") as pod:
        await asyncio.to_thread(pod.wait_ready)
        node = Node(hello("gateway/1/x"))
        try:
            node.links.dial(Address("p/3", pod.links))
            await node.received.until(lambda: bool(node.received.up))
            received = node.received.up[0]
            assert received.target == "pod.example:7000"
            assert received.peer.startswith("p/3/")
        finally:
            await node.links.close()


def test_probes_are_answered_beside_silent_connections() -> None:
    with running(*HASH) as pod:
        pod.wait_ready()
        host, _, port = pod.page.partition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(50)]
        try:
            began = time.monotonic()
            assert pod.ask("/live")[0] == 200
            assert time.monotonic() - began < 2.0
            assert silent[0].recv(1) == b"", "they are closed after some seconds"
        finally:
            for each in silent:
                each.close()


REFUSALS = {
    "no such model": (("--model", "file:///no/such/folder"), "--model: "),
    "too much of it": (("--hash-model", "--hash-blocks", "2"), "--blocks: "),
    "a port in use": ((*HASH, "--metrics", "TAKEN"), "--metrics: cannot listen on"),
    "no address": ((*HASH, "--listen", "0.0.0.0:0"), "--advertise: is needed"),
    "a hub that is not there": (("--model", "hf://unknown/nothing"), "--model: "),
}


@pytest.mark.parametrize(("flags", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
def test_the_last_line_is_the_reason(flags: tuple[str, ...], reason: str) -> None:
    """The last line of the log is the reason, as Kubernetes shows it as the container's last message."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}"}
        flags = tuple(flag.replace("TAKEN", f"127.0.0.1:{port}") for flag in flags)
        with running(*flags, env=environment) as pod:
            code, log = pod.end()
    assert code == 2
    assert log.splitlines()[-1].startswith(f"modelswarm-server: {reason}")
    assert "Traceback" not in log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_server_runs_without_user_name_home_and_writes(model: Path, tmp_path: Path) -> None:
    """The server runs as uid 65532, which has no passwd entry and may read, but not write, the model's files."""
    tmp = tmp_path / "tmp"
    tmp.mkdir(mode=0o777)
    tmp.chmod(0o777)
    rights = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    user = ("setpriv", "--reuid=65532", "--regid=65532", "--clear-groups", *rights)
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp), "HF_HOME": str(tmp / "hub")}
    with running("--model", f"file://{model}", prefix=user, env=environment) as pod:
        eventually("it is ready or gone", lambda: done(pod), 120)
        assert pod.process.poll() is None, pod.end()
        status = Path(f"/proc/{pod.process.pid}/status").read_text()
        assert "Uid:\t65532" in status
        pod.process.send_signal(signal.SIGTERM)
        code, log = pod.end()
    assert code == 0, log
    assert "Traceback" not in log
    assert "Permission denied" not in log


def done(pod: Pod) -> bool:
    return pod.process.poll() is not None or pod.ask("/ready")[0] == 200
