"""Answers bytes that are no protobuf message, and messages with unknown fields, with INVALID_ARGUMENT.

An interceptor of the gRPC server. grpc itself answers UNKNOWN with the words of the parser, and logs a traceback for
every such request. Its table of codes says INTERNAL; that would blame this server for the client's fault.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio

from modelswarm_gateway.api.grpc.status import Context, abort_call
from modelswarm_gateway.errors import ApiError, Code

Handler = Any  # grpc.RpcMethodHandler: the stubs lack its fields
OnMalformed = Callable[[str], None]


# Services whose messages are ours. Those of health and reflection may be newer than this gateway.
OWN_SERVICES = "/modelswarm."


@dataclass(frozen=True, slots=True)
class MalformedRequest:
    """Stands for a request that cannot be answered."""

    error: ApiError

    async def abort(self, context: Context) -> None:
        await abort_call(context, self.error)


def _not_a_message(size: int) -> MalformedRequest:
    detail = f"the request ({size} bytes) is not a message of this method's request type"
    return MalformedRequest(ApiError(Code.INVALID_REQUEST, detail))


def find_unknown_field(message: Message, path: str = "") -> str | None:
    """Return the place of a field that this gateway's api.proto does not have, such as `sampling.17`; None without."""
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        return f"{path}{unknown[0].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue  # a number, a text, or a map of such
        for inner in value if field.is_repeated else (value,):
            if found := find_unknown_field(inner, f"{path}{field.name}."):
                return found
    return None


def _unknown_field(place: str) -> MalformedRequest:
    detail = f"{place}: unknown field number; this gateway's api.proto has no such field"
    return MalformedRequest(ApiError(Code.UNKNOWN_PARAMETER, detail, param=place))


class MalformedRequestInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, on_malformed: OnMalformed) -> None:
        """`on_malformed` is called with the method's name for each such request."""
        self._on_malformed = on_malformed
        self._handlers: dict[str, Handler] = {}  # by method; only those that exist

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Handler]], handler_call_details: Any
    ) -> Handler:
        method = handler_call_details.method
        found = self._handlers.get(method)
        if found is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            own = method.startswith(OWN_SERVICES)
            found = _guard(handler, lambda: self._on_malformed(method), is_own=own)
            self._handlers[method] = found
        return found


def _guard(handler: Handler, on_malformed: Callable[[], None], *, is_own: bool) -> Handler:
    """Return the handler with a deserializer that does not raise, and a method that refuses what it returns then."""

    def deserialize(raw: bytes) -> Any:
        try:
            message = handler.request_deserializer(raw)
        except DecodeError:
            on_malformed()
            return _not_a_message(len(raw))
        unknown = find_unknown_field(message) if is_own else None
        return message if unknown is None else _unknown_field(unknown)

    serialize = handler.response_serializer
    if handler.unary_unary:
        guarded = _guard_call(handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(guarded, deserialize, serialize)
    if handler.unary_stream:
        method = handler.unary_stream
        wrap = _guard_generator if inspect.isasyncgenfunction(method) else _guard_call
        return grpc.unary_stream_rpc_method_handler(wrap(method), deserialize, serialize)
    if handler.stream_stream:
        guarded = _guard_iterator(handler.stream_stream)
        return grpc.stream_stream_rpc_method_handler(guarded, deserialize, serialize)
    raise NotImplementedError("no service of this server has client streaming")


def _guard_call(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: Context) -> Any:
        if isinstance(request, MalformedRequest):
            await request.abort(context)
        return await method(request, context)

    return guarded


def _guard_generator(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, MalformedRequest):
            await request.abort(context)
        async for response in method(request, context):
            yield response

    return guarded


def _guard_iterator(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
    async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, MalformedRequest):
                await request.abort(context)
            yield request

    async def guarded(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for response in method(checked(requests, context), context):
            yield response

    return guarded
