"""CPU time of the gateway for each token that it streams, over HTTP and over gRPC.

Real processes: two servers of the hash model, which computes almost nothing, a gateway, and eight streams. The time is
that of the gateway process only, so it hardly depends on what else the machine does.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
from support.processes.swarm import ENDLESS, MODEL, Endpoints, two_spans

from bench.harness import Bar, Result
from bench.speed.gateway_process import cpu_seconds
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

STREAMS, TOKENS = 8, 3000
WARM_TOKENS = 200
LIMIT_SECONDS = 300.0
BODY = {"model": MODEL, "temperature": 1, "seed": 7, "ignore_eos": True, "stream": True}
CHAT = BODY | {"messages": [{"role": "user", "content": "tell me"}]}


def run() -> Result:
    with tempfile.TemporaryDirectory() as folder, two_spans(Path(folder), context=ENDLESS) as swarm:
        gateway = swarm.gateway()
        figures = {
            "ms_per_token": _ms_per_token(gateway, _stream_http),
            "grpc_ms_per_token": _ms_per_token(gateway, _stream_grpc),
        }
    figures["load"] = os.getloadavg()[0]
    return Result(
        name="stream_cpu",
        figures=figures,
        columns=("stream of", "ms of gateway CPU per token"),
        rows=[
            ("chat over HTTP", f"{figures['ms_per_token']:.4f}"),
            ("text over gRPC", f"{figures['grpc_ms_per_token']:.4f}"),
        ],
        shape=f"two servers of the hash model, {STREAMS} streams of {TOKENS} tokens, load {figures['load']:.1f}",
        threads=1,
        bars=[Bar("ms_per_token", "<=", 0.12)],
    )


def _ms_per_token(gateway: Endpoints, stream: Callable[[Endpoints, int], int]) -> float:
    with ThreadPoolExecutor(STREAMS) as pool:
        _stream_all(pool, gateway, stream, WARM_TOKENS)
        before = cpu_seconds(gateway.pid)
        tokens = _stream_all(pool, gateway, stream, TOKENS)
        return (cpu_seconds(gateway.pid) - before) * 1e3 / tokens


def _stream_all(
    pool: ThreadPoolExecutor,
    gateway: Endpoints,
    stream: Callable[[Endpoints, int], int],
    count: int,
) -> int:
    """Read all streams side by side; return the number of their tokens, which must be exact."""
    found = list(pool.map(lambda _: stream(gateway, count), range(STREAMS)))
    if found != [count] * STREAMS:
        raise RuntimeError(f"{found} tokens came, {count} were wanted of each")
    return sum(found)


def _stream_http(gateway: Endpoints, count: int) -> int:
    body = CHAT | {"max_tokens": count, "stream_options": {"include_usage": True}}
    url = f"{gateway.url}/v1/chat/completions"
    end = b""
    with httpx.stream("POST", url, json=body, timeout=LIMIT_SECONDS) as answer:
        answer.raise_for_status()
        for part in answer.iter_raw():
            end = (end + part)[-4096:]
    last = [line for line in end.splitlines() if line.startswith(b"data: {")][-1]
    tokens: int = json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return tokens


def _stream_grpc(gateway: Endpoints, count: int) -> int:
    request = api_pb2.GenerateRequest(
        model=MODEL,
        prompt="tell me",
        max_tokens=count,
        sampling=api_pb2.Sampling(temperature=1.0, seed=7),
        ignore_eos=True,
    )
    with grpc.insecure_channel(gateway.grpc) as channel:
        answer = api_pb2_grpc.InferenceStub(channel).GenerateStream(request, timeout=LIMIT_SECONDS)
        return sum(len(part.token_ids) for part in answer)
