"""The calls of the Inference service that run no model: ListModels, Tokenize and Detokenize, as over HTTP.

Base of the servicer in `inference.py`. Knows no sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.grpc.field_names import rename_field
from modelswarm_gateway.api.grpc.forwarding import is_forwarded
from modelswarm_gateway.api.grpc.requests import parse_detokenize_request, parse_tokenize_request
from modelswarm_gateway.api.grpc.status import Context, abort_call
from modelswarm_gateway.api.tokenization import detokenize, tokenize_prompt
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.core.interface.row_sizes import RAW
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.metrics.grpc_requests import counted_request

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class ModelCalls(api_pb2_grpc.InferenceServicer):
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def ListModels(
        self, request: api_pb2.ListModelsRequest, context: Context
    ) -> api_pb2.ListModelsResponse:
        cards = self._service.backend.model_cards()
        return api_pb2.ListModelsResponse(models=[_model(card) for card in cards])

    async def Tokenize(
        self, request: api_pb2.TokenizeRequest, context: Context
    ) -> api_pb2.TokenizeResponse:
        async def tokenize() -> api_pb2.TokenizeResponse:
            found = await tokenize_prompt(self._service, parse_tokenize_request(request))
            return api_pb2.TokenizeResponse(
                tokens=found.tokens,
                count=len(found.tokens),
                max_model_len=found.max_length,
                token_strs=found.names,
            )

        empty = api_pb2.TokenizeResponse
        return await self._answer_or_abort(tokenize, context, empty, request.model)

    async def Detokenize(
        self, request: api_pb2.DetokenizeRequest, context: Context
    ) -> api_pb2.DetokenizeResponse:
        async def text() -> api_pb2.DetokenizeResponse:
            found = await detokenize(self._service, parse_detokenize_request(request))
            return api_pb2.DetokenizeResponse(prompt=found)

        empty = api_pb2.DetokenizeResponse
        return await self._answer_or_abort(text, context, empty, request.model)

    async def _answer_or_abort(
        self,
        answer: Callable[[], Awaitable[Answer]],
        context: Context,
        empty: Callable[[], Answer],
        model: str,
    ) -> Answer:
        """Return the answer of a unary call about `model`; end the call with the status of its error."""
        try:
            if is_forwarded(context):
                return await answer()
            with counted_request(self._service.metrics, lambda: model):
                return await answer()
        except ApiError as error:
            failure = rename_field(error)
        except Exception:
            log.exception("internal error while answering a call")
            failure = ApiError(Code.INTERNAL, "internal error")
        await abort_call(context, failure)
        return empty()  # the call was aborted


def _model(card: ModelCard) -> api_pb2.Model:
    rows = card.boundary_rows
    return api_pb2.Model(
        id=card.name,
        created=card.known_since,
        max_model_len=card.max_length,
        ready=card.ready,
        chat=None if card.tokenizer is None else not card.chat_problem,
        chat_problem=card.chat_problem,
        vocab_size=card.vocabulary,
        n_blocks=card.n_blocks,
        hidden_size=0 if rows.dtype == RAW else rows.hidden_bytes // rows.number_bytes,
        dtype=rows.dtype if rows.hidden_bytes else "",
        parent=card.parent,
        block_rows=card.takes_block_rows,
    )
