"""Ends a gRPC call with the status and the error details of an ApiError. Used by both servicers.

The details are google.rpc's messages, which the gRPC libraries of many languages read. The same is in the trailing
metadata as text.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio

from modelswarm_gateway.errors import ApiError

Context: TypeAlias = "aio.ServicerContext[Any, Any]"
DOMAIN = "modelswarm.io"  # of the reasons
DETAILS_KEY = "grpc-status-details-bin"
# Seconds after which a call may be repeated whose error names no time.
DEFAULT_RETRY_SECONDS = 1.0
# Longest sentence: grpc's clients take 8 KiB of metadata, which has it up to three times, and encoded.
MAX_SENTENCE_BYTES = 1024


async def abort_call(context: Context, error: ApiError) -> None:
    """End the call with the status of the error, and its details in the trailing metadata."""
    trailing: list[tuple[str, str | bytes]] = [("error-code", error.code.value)]
    if error.param is not None:
        trailing.append(("error-param", error.param))
    if error.retry_after is not None:
        trailing.append(("retry-after", f"{error.retry_after:.3f}"))
    status = build_status(error)
    trailing.append((DETAILS_KEY, status.SerializeToString()))
    await context.abort(error.mapping.grpc, status.message, tuple(trailing))


def build_status(error: ApiError) -> status_pb2.Status:
    """Return google.rpc's Status: ErrorInfo, BadRequest for a wrong field, and RetryInfo if a retry may succeed."""
    code, sentence = error.mapping.grpc, _bounded(error.message)
    info = {"code": error.code.value, "type": error.mapping.type}
    if error.param is not None:
        info["param"] = error.param
    reason = error.code.value.upper()
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=info)
    ]
    if error.param is not None and code is StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.param, description=sentence
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.is_retryable:
        delay = Duration()
        delay.FromMilliseconds(round(1000 * (error.retry_after or DEFAULT_RETRY_SECONDS)))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    number: int = code.value[0]
    return status_pb2.Status(code=number, message=sentence, details=map(_pack, details))


def _bounded(sentence: str) -> str:
    raw = sentence.encode()
    cut = raw[:MAX_SENTENCE_BYTES].decode(errors="ignore")
    return sentence if len(raw) <= MAX_SENTENCE_BYTES else f"{cut}…"


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
