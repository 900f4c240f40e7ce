"""Forwards a gRPC call to the gateway that owns its session, and returns the parts as they arrive (R20, takeover).

Used by the Inference service; `api/forwarding.py` does the same for HTTP. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelswarm.process.socket_options import WITHOUT_PROXY
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.failover import MOVED_CODES
from modelswarm_gateway.api.forwarding import (
    CONNECT_SECONDS,
    FORWARDED_HEADER,
    AliveCheck,
    PeerGone,
    await_while_alive,
)
from modelswarm_gateway.api.grpc.status import Context
from modelswarm_gateway.errors import ApiError, Code, parse_code
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.service import GenerationService

OWN_CONNECTION = (
    # Else all calls to a gateway would share one connection, which has a bounded number of streams.
    ("grpc.use_local_subchannel_pool", 1),
    # Log probabilities of a long prompt are one part, of up to some 100 MiB; gRPC takes 4 MiB by itself.
    ("grpc.max_receive_message_length", 256 << 20),
    WITHOUT_PROXY,
)


def is_forwarded(context: Context) -> bool:
    """Return whether another gateway has sent this call."""
    return any(name == FORWARDED_HEADER for name, _ in context.invocation_metadata() or ())


async def forward_stream(
    target: str, request: api_pb2.GenerateRequest, is_alive: AliveCheck
) -> AsyncGenerator[api_pb2.GenerateResponse, None]:
    """Yield the parts of the owning gateway's answer. Raise PeerGone when it stops answering, or its ApiError."""
    has_part = finished = False
    async with aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
        call = api_pb2_grpc.InferenceStub(channel).GenerateStream(
            request, metadata=((FORWARDED_HEADER, "1"),)
        )
        parts = aiter(call)
        try:
            while (part := await await_while_alive(anext(parts, None), is_alive)) is not None:
                yield part
                has_part, finished = True, bool(part.finish_reason)
        except (aio.AioRpcError, PeerGone) as error:
            if not finished:
                raise await _translate_error(error, has_part, is_alive) from error
        finally:
            call.cancel()
    if not finished:
        raise PeerGone


async def _translate_error(
    error: aio.AioRpcError | PeerGone, has_part: bool, is_alive: AliveCheck
) -> Exception:
    """Return the other gateway's error as ApiError; errors of its gRPC library or of the network mean PeerGone."""
    if isinstance(error, PeerGone):
        return error
    if (found := read_error(error)) is not None:
        return PeerGone() if has_part and found.code in MOVED_CODES else found
    if has_part or not await is_alive():
        return PeerGone()
    detail = f"the gateway that holds this session cannot be reached: {error.details()}"
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)


def read_error(error: aio.AioRpcError) -> ApiError | None:
    """Return the ApiError of another gateway; None for an error of its gRPC library or of the network."""
    trailing: Any = error.trailing_metadata()  # grpc's types forget that it is a sequence
    metadata = {name: str(value) for name, value in trailing or ()}
    if "error-code" not in metadata:
        return None
    wait = float(metadata["retry-after"]) if "retry-after" in metadata else None
    return ApiError(
        parse_code(metadata["error-code"]),
        error.details() or "",
        param=metadata.get("error-param"),
        retry_after=wait,
    )


async def is_alive_at(service: GenerationService, request: GenerationRequest, target: str) -> bool:
    """Return whether servers know the gateway at `target` as the owner; if they know none, whether it responds."""
    is_alive = await service.is_owned_by(request, target)
    return await is_responding(target) if is_alive is None else is_alive


async def is_responding(target: str) -> bool:
    """Return whether the gateway at `target` responds."""
    async with aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await check(health_pb2.HealthCheckRequest(), timeout=CONNECT_SECONDS)
        except aio.AioRpcError:
            return False
    return True
