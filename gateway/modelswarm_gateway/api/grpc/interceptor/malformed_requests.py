"""Refuses requests before their methods see them: no protobuf message, unknown fields, too many parts, or late ones.

An interceptor of the gRPC server. For what is no message, grpc itself answers UNKNOWN with the words of the parser, and
logs a traceback each time. Its table of codes says INTERNAL; that would blame this server for the client's fault. Every
method is registered as one with a stream of requests, since grpc reads a single request without a deadline.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio

from modelswarm_gateway.api.grpc.forwarding import is_forwarded
from modelswarm_gateway.api.grpc.interceptor.slow_messages import SlowMessages
from modelswarm_gateway.api.grpc.status import Context, abort_call
from modelswarm_gateway.errors import ApiError, Code, invalid_request

Handler = Any  # grpc.RpcMethodHandler: the stubs lack its fields
OnRefused = Callable[[str, Code], None]


# Streams that watch the health of the server, which have no end of their own.
MAX_WATCHES = 256
# Texts, messages and entries of maps in the lists of a request. One may have two bytes, and takes 3 us of the event
# loop and 170 bytes of memory. So one request of 16 MiB took 22 s and 1.4 GiB.
MAX_PARTS = 1 << 16
_PARTS = (FieldDescriptor.CPPTYPE_MESSAGE, FieldDescriptor.CPPTYPE_STRING)
# Services whose messages are ours. Those of health and reflection may be newer than this gateway.
OWN_SERVICES = "/modelswarm."


@dataclass(frozen=True, slots=True)
class MalformedRequest:
    """Stands for a request that cannot be answered."""

    error: ApiError


def _not_a_message(size: int) -> MalformedRequest:
    detail = f"the request ({size} bytes) is not a message of this method's request type"
    return MalformedRequest(ApiError(Code.INVALID_REQUEST, detail))


def find_fault(message: Message) -> ApiError | None:
    """Return the first fault of a request: too many parts, or a field that this gateway's api.proto does not have."""
    parts, waiting = 0, [("", message)]
    for path, each in waiting:  # which grows meanwhile
        unknown = UnknownFieldSet(each)
        if len(unknown) > 0:
            return _unknown_field(f"{path}{unknown[0].field_number}")
        for field, value in each.ListFields():
            if field.cpp_type not in _PARTS:
                continue
            if field.is_repeated:
                parts += len(value)
            if parts > MAX_PARTS:
                return _too_many_parts(f"{path}{field.name}", parts)
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                inner = value if field.is_repeated else (value,)
                waiting += [(f"{path}{field.name}.", part) for part in inner]
    return None


def _unknown_field(place: str) -> ApiError:
    detail = f"{place}: unknown field number; this gateway's api.proto has no such field"
    return ApiError(Code.UNKNOWN_PARAMETER, detail, param=place)


def _too_many_parts(place: str, count: int) -> ApiError:
    detail = f"{count} texts, messages and entries of maps in the lists of a request"
    return invalid_request(place, f"{place}: {detail}; allowed: at most {MAX_PARTS}")


class MalformedRequestInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, on_refused: OnRefused) -> None:
        """`on_refused` is called with the method's name and the error's code for each such request of a client."""
        self._on_refused = on_refused
        self._slow = SlowMessages()
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
            guard = _Guard(handler, partial(self._on_refused, method), self._slow)
            found = guard.handler(is_own=method.startswith(OWN_SERVICES))
            self._handlers[method] = found
        return found


class _Guard:
    """Makes a handler whose method gets only requests that it can answer."""

    def __init__(
        self, handler: Handler, on_refused: Callable[[Code], None], slow: SlowMessages
    ) -> None:
        self._handler, self._on_refused, self._slow = handler, on_refused, slow
        self._watches = 0

    def handler(self, *, is_own: bool) -> Handler:
        """Return the handler. `is_own`: the messages are ours, so unknown fields are faults."""
        given = self._handler
        serialize = given.response_serializer

        def deserialize(raw: bytes) -> Any:
            try:
                message = given.request_deserializer(raw)
            except DecodeError:
                return _not_a_message(len(raw))
            fault = find_fault(message) if is_own else None
            return message if fault is None else MalformedRequest(fault)

        if given.unary_unary:
            call = self._one_request(given.unary_unary)
            return grpc.stream_unary_rpc_method_handler(call, deserialize, serialize)
        if given.unary_stream:
            method: Any = given.unary_stream if is_own else self._watch(given.unary_stream)
            is_generator = inspect.isasyncgenfunction(method)
            stream = self._one_request_stream(method) if is_generator else self._one_request(method)
            return grpc.stream_stream_rpc_method_handler(stream, deserialize, serialize)
        if given.stream_stream:
            stream = self._many_requests(given.stream_stream, is_own=is_own)
            return grpc.stream_stream_rpc_method_handler(stream, deserialize, serialize)
        raise NotImplementedError("no service of this server has client streaming")

    def _one_request(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
            return await method(await self._read(requests, context), context)

        return guarded

    def _one_request_stream(self, method: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
        async def guarded(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async for response in method(await self._read(requests, context), context):
                yield response

        return guarded

    def _watch(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def bounded(request: Any, context: Context) -> Any:
            if self._watches >= MAX_WATCHES:
                detail = f"{MAX_WATCHES} calls watch the health already; retry in 1 s"
                await abort_call(context, ApiError(Code.NO_CAPACITY, detail, retry_after=1.0))
            self._watches += 1
            try:
                return await method(request, context)
            finally:
                self._watches -= 1

        return bounded

    def _many_requests(
        self, method: Callable[..., AsyncIterator[Any]], *, is_own: bool
    ) -> Callable[..., Any]:
        """Bound the first request of our own methods, which time the next ones; of others all."""

        async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            request = await self._find(requests, context)
            while request is not None:
                yield await self._checked(request, context)
                next_one = anext(requests, None) if is_own else self._find(requests, context)
                request = await next_one

        async def guarded(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async for response in method(checked(requests, context), context):
                yield response

        return guarded

    async def _read(self, requests: AsyncIterator[Any], context: Context) -> Any:
        """Return the request of a call that has one. End the call if it has none, or one that cannot be answered."""
        request = await self._find(requests, context)
        if request is None:
            await self._refuse(context, invalid_request(None, "the call has no request message"))
        return await self._checked(request, context)

    async def _find(self, requests: AsyncIterator[Any], context: Context) -> Any:
        """Return the next request, None after the last one. End the call if it comes too slowly."""
        try:
            return await self._slow.read(requests)
        except ApiError as error:
            await self._refuse(context, error)

    async def _checked(self, request: Any, context: Context) -> Any:
        """Return the request. End the call if it cannot be answered."""
        if isinstance(request, MalformedRequest):
            await self._refuse(context, request.error)
        return request

    async def _refuse(self, context: Context, error: ApiError) -> None:
        if not is_forwarded(context):
            self._on_refused(error.code)
        await abort_call(context, error)
