"""Ends a gRPC call with the status and the details of an ApiError. Used by both servicers."""

from __future__ import annotations

from typing import Any, TypeAlias

from grpc import aio

from modelswarm_gateway.errors import ApiError

Context: TypeAlias = "aio.ServicerContext[Any, Any]"


async def abort_call(context: Context, error: ApiError) -> None:
    """End the call with the status of the error, and its details in the trailing metadata."""
    trailing = [("error-code", error.code.value)]
    if error.param is not None:
        trailing.append(("error-param", error.param))
    if error.retry_after is not None:
        trailing.append(("retry-after", f"{error.retry_after:.3f}"))
    await context.abort(error.mapping.grpc, error.message, tuple(trailing))
