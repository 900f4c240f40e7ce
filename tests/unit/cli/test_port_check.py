"""A wrong address is explained by the kind of server there: real HTTP, gRPC and metrics ports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from starlette.testclient import TestClient
from support.eventually import SECONDS
from support.ports import free_port, grpc_port, http_port
from typing_extensions import override

from modelswarm.cli import run
from modelswarm.local import port_check
from modelswarm.local.port_check import Answer, explain_answer, probe
from modelswarm.local.run_folder import RunFolder, RunInfo
from modelswarm_gateway.api.metrics_app import build_metrics_app


class GatewayHandler(BaseHTTPRequestHandler):
    """Answers like a gateway's HTTP API; without `is_gateway` like another HTTP server."""

    is_gateway = True

    def do_GET(self) -> None:
        self.send_response(200)
        if self.is_gateway:
            self.send_header("x-request-id", "req_1")
        self.end_headers()
        self.wfile.write(b"<html></html>")

    @override
    def log_message(self, *parts: object) -> None:
        """Print nothing."""


class OtherHandler(GatewayHandler):
    is_gateway = False


class GatewayMetricsHandler(GatewayHandler):
    """Answers like a gateway's metrics port."""

    @override
    def do_GET(self) -> None:
        answer = TestClient(build_metrics_app(CollectorRegistry())).get(self.path)
        self.send_response(answer.status_code)
        self.end_headers()
        self.wfile.write(answer.content)


@contextmanager
def metrics_port() -> Iterator[int]:
    server, thread = start_http_server(0, "127.0.0.1")
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(port_check, "PROBE_SECONDS", SECONDS)  # for a busy machine


def test_each_kind_of_port_is_recognised() -> None:
    with http_port(GatewayHandler) as port:
        assert probe("127.0.0.1", port) is Answer.GATEWAY
    with http_port(OtherHandler) as port:
        assert probe("127.0.0.1", port) is Answer.OTHER_HTTP
    with metrics_port() as port:
        assert probe("127.0.0.1", port) is Answer.METRICS
    with http_port(GatewayMetricsHandler) as port:
        assert probe("127.0.0.1", port) is Answer.METRICS
    with grpc_port() as port:
        assert probe("127.0.0.1", port) is Answer.GRPC
    assert probe("127.0.0.1", free_port()) is None


def test_right_port_and_no_port_need_no_explanation() -> None:
    with http_port(GatewayHandler) as port:
        assert explain_answer(f"http://127.0.0.1:{port}", "HTTP") is None
    with grpc_port() as port:
        assert explain_answer(f"127.0.0.1:{port}", "gRPC") is None
    assert explain_answer(f"127.0.0.1:{free_port()}", "gRPC") is None
    assert explain_answer("nonsense", "gRPC") is None


def test_gateway_without_tls_is_told_for_https() -> None:
    with http_port(GatewayHandler) as port:
        told = explain_answer(f"https://127.0.0.1:{port}", "HTTP")
    assert told == (
        f"https://127.0.0.1:{port} is the HTTP port of a gateway without TLS; "
        f"allowed: http://127.0.0.1:{port}"
    )
    with http_port(OtherHandler) as port:
        assert explain_answer(f"https://127.0.0.1:{port}", "HTTP") is None


def test_port_of_a_local_swarm_names_the_right_address() -> None:
    with metrics_port() as port:
        metrics = f"127.0.0.1:{port}"
        info = RunInfo("one", "m", 1, "127.0.0.1:9000", "127.0.0.1:9001", metrics, "127.0.0.1:9003")
        folder = RunFolder.claim("one")
        try:
            folder.publish(info)
            for_http = explain_answer(f"http://{metrics}", "HTTP")
            for_grpc = explain_answer(metrics, "gRPC")
            folder.publish(replace(info, metrics="127.0.0.1:9002"))
            elsewhere = explain_answer(metrics, "gRPC")
        finally:
            folder.release()

    assert for_http == (
        f"http://{metrics} is a metrics port; allowed: the gateway's HTTP port, http://127.0.0.1:9000"
    )
    assert for_grpc is not None and "admin port, 127.0.0.1:9003 (--admin)" in for_grpc
    assert elsewhere is not None and "by default port 8003" in elsewhere


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_generate_with_a_wrong_port_is_one_sentence(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, kind in ((metrics_port, "a metrics port"), (grpc_port, "a gRPC port")):
        with wrong() as port:
            assert run(["generate", "x", "--url", f"http://127.0.0.1:{port}", *flags]) == 1
        told = capsys.readouterr().err
        assert f"Error: http://127.0.0.1:{port} is {kind}; allowed: " in told
        assert len(told.splitlines()) == 1


@pytest.mark.parametrize("command", [("status",), ("routes", "--json"), ("drain", "s")])
def test_grpc_command_with_a_wrong_port_is_one_sentence(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with http_port(GatewayHandler) as port:
        assert run([*command, "--admin", f"127.0.0.1:{port}"]) == 1

    told = capsys.readouterr().err
    assert told.startswith(f"Error: 127.0.0.1:{port} is the HTTP port of a gateway; allowed: ")
    assert len(told.splitlines()) == 1
