"""Clients of held sessions: they are told the reason, and the end."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.eventually import eventually
from support.processes.http_requests import (
    FOREVER,
    IDS,
    expected_tokens,
    lines,
    read_until,
    tokens_of,
    whole,
)
from support.processes.swarm import BRIEF_HOLD, ENDLESS, MODEL, Endpoints, two_spans

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

OFTEN = ("--keepalive", "0.3")
RESUMED = "modelswarm_gateway_recovery_seconds_count"
ASK = api_pb2.GenerateRequest(model=MODEL, prompt="go", max_tokens=50_000, ignore_eos=True)
PINGING = (  # a client that detects a lost gateway early
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
)


def test_held_stream_gets_comments_with_the_reason(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN)

        def is_saved(comments: list[str]) -> bool:
            if len(comments) == 3 and "s2" not in swarm.processes:
                swarm.server("s2", "2:4")
            return endpoints.metric(RESUMED) == 1

        got, comments = read_until(endpoints, FOREVER, lambda: swarm.kill("s1"), is_saved)
        assert got == expected_tokens(len(got))
        assert f": waiting for a route: no server holds blocks 2:4 of {MODEL}" in comments
        assert endpoints.metric("modelswarm_gateway_reroutes_total") >= 1


@pytest.mark.full
def test_answer_that_has_not_begun_gets_comments(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN)
        expected = whole(endpoints, IDS)
        swarm.kill("s1", signal.SIGSTOP)
        answer = lines(endpoints, IDS)
        try:
            assert next(answer).startswith(": waiting")
        finally:
            swarm.kill("s1", signal.SIGCONT)
        assert [token for line in answer for token in tokens_of(line)] == expected


@pytest.mark.full
def test_held_call_outlives_the_pings_of_its_client(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN)
        with grpc.insecure_channel(endpoints.grpc, options=PINGING) as channel:
            stub = api_pb2_grpc.InferenceStub(channel)
            got: list[int] = []
            held_at = 0
            call: Any = stub.GenerateStream(ASK, timeout=60)
            for part in call:
                got += part.token_ids
                if len(got) > 20 and not held_at:
                    swarm.kill("s1")
                    time.sleep(5.0)  # three pings without data: two more than gRPC's default allows
                    swarm.server("s2", "2:4")
                    eventually("the session goes on", lambda: endpoints.metric(RESUMED) == 1)
                    held_at = len(got)
                if held_at and len(got) > held_at + 200:
                    break
            call.cancel()
            assert got == expected_tokens(len(got))


@pytest.mark.full
def test_a_held_call_is_pinged_by_its_gateway(tmp_path: Path) -> None:
    """A held call sends no data, so only pings show proxies that the connection is in use."""
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN)
        with (
            PingCounter(endpoints.grpc) as counter,
            grpc.insecure_channel(counter.target) as channel,
        ):
            call: Any = api_pb2_grpc.InferenceStub(channel).GenerateStream(ASK, timeout=60)
            next(call)
            swarm.kill("s1")
            eventually("it is held", lambda: held(endpoints))
            before = counter.pings
            time.sleep(3.0)
            pings = counter.pings - before
            assert held(endpoints)
            call.cancel()
    assert pings >= 5


class PingCounter:
    """A TCP proxy for one connection that counts the HTTP/2 pings of its server."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.pings = 0

    def __enter__(self) -> PingCounter:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with self._listener.accept()[0] as client, socket.create_connection(self._server) as server:
            back = threading.Thread(target=self._count, args=(server, client), daemon=True)
            back.start()
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)
            back.join()

    def _count(self, server: socket.socket, client: socket.socket) -> None:
        """Pass frames `length u24 | type | flags | stream u32` to the client."""
        with server.makefile("rb") as frames:
            while head := frames.read(9):
                is_ack = head[4] & 1
                self.pings += head[3] == 6 and not is_ack
                client.sendall(head + frames.read(int.from_bytes(head[:3], "big")))


def held(endpoints: Endpoints) -> bool:
    return endpoints.metric("modelswarm_gateway_sessions", state="held") == 1


@pytest.mark.full
def test_held_call_ends_with_the_reason_when_the_hold_ends(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*OFTEN, *BRIEF_HOLD)
        with grpc.insecure_channel(endpoints.grpc) as channel:
            got: list[int] = []
            ended: Any = None
            try:
                for part in api_pb2_grpc.InferenceStub(channel).GenerateStream(ASK, timeout=60):
                    got += part.token_ids
                    if len(got) > 20 and swarm.processes["s1"].poll() is None:
                        swarm.kill("s1")
            except grpc.RpcError as error:
                ended = error
        assert ended.code() is grpc.StatusCode.INTERNAL
        assert "no server holds blocks 2:4" in ended.details()
        assert ("error-code", "stream_broken") in ended.trailing_metadata()


@pytest.mark.full
def test_hold_shorter_than_keepalive_is_reported_before_its_end(tmp_path: Path) -> None:
    with two_spans(tmp_path, "--hold-limit", "2", context=ENDLESS) as swarm:
        endpoints = swarm.gateway("--keepalive", "5", detects_silence=True)
        got: list[int] = []
        received: list[str] = []
        for line in lines(endpoints, FOREVER):
            if swarm.processes["s1"].poll() is not None:
                received.append(line)
                continue
            got += tokens_of(line)
            if len(got) > 20:
                swarm.kill("s1")
        assert f": waiting for a route: no server holds blocks 2:4 of {MODEL}" in received[:-1]
        assert (
            received[-1].startswith('data: {"error"')
            and "no server holds blocks 2:4" in received[-1]
        )
        assert "was started with --hold-limit 2, this process with --fence-timeout 5" in swarm.log(
            "gateway"
        )
