"""The Inference service of api.proto: one generation as one response or as a stream.

Added to the server by `server.py`. A call whose session another gateway owns is forwarded there. Knows neither sessions
nor servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.forwarding import FORWARDED_HEADER
from modelswarm_gateway.api.grpc.answers import Caller, stream_answer
from modelswarm_gateway.api.grpc.field_names import rename_field
from modelswarm_gateway.api.grpc.model_calls import ModelCalls
from modelswarm_gateway.api.grpc.requests import count_answers
from modelswarm_gateway.api.grpc.responses import join_parts
from modelswarm_gateway.api.grpc.status import Context, abort_call
from modelswarm_gateway.errors import ApiError, Code

log = logging.getLogger(__name__)


class Inference(ModelCalls):
    async def Generate(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> api_pb2.GenerateResponse:
        parts = [part async for part in self._answer(request, context)]
        if not parts:
            return api_pb2.GenerateResponse()  # the call was aborted
        return join_parts(parts, count_answers(request))

    async def GenerateStream(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        async for part in self._answer(request, context):
            yield part

    async def _answer(
        self, request: api_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        async def accept() -> None:
            await context.send_initial_metadata(())  # the call was accepted, and waits

        forwarded = any(name == FORWARDED_HEADER for name, _ in context.invocation_metadata() or ())
        failure: ApiError | None = None
        try:
            answer = stream_answer(self._service, request, Caller(forwarded, accept))
            async with aclosing(answer) as parts:
                async for part in parts:
                    yield part
        except ApiError as error:
            failure = rename_field(error)
        except (asyncio.CancelledError, GeneratorExit):
            self._service.metrics.count_request(request.model, Code.CANCELLED)
            raise
        except Exception:
            log.exception("internal error while answering a request")
            failure = ApiError(Code.INTERNAL, "internal error")
        self._service.metrics.count_request(request.model, failure.code if failure else None)
        if failure is not None:
            await abort_call(context, failure)
