"""The connection to a gateway's gRPC API, shared by all sessions and answers of a model.

Addresses: `host:port`, `http://host:port` and `grpc://host:port` without TLS; `https://host:port` and
`grpcs://host:port` with it. The port is that of --grpc, by default 8001.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import grpc

from modelswarm.client.announcement import announced_grpc_port
from modelswarm.client.sessions.channels import Channels
from modelswarm.client.sessions.errors import translate
from modelswarm.errors import UserError
from modelswarm.process.socket_options import WITHOUT_PROXY
from modelswarm.protocol.wire import api_pb2

DEFAULT_GATEWAY = "127.0.0.1:8001"
GATEWAY_VARIABLE = "MODELSWARM_GATEWAY"
"""Environment variable with the address of the gateway, for programs that name none."""
_SECURE = {"http": False, "grpc": False, "https": True, "grpcs": True}
_ALLOWED = "host:port, http://host:port, or https://host:port, of the gateway's gRPC port"
_OPTIONS = (
    (
        "grpc.keepalive_time_ms",
        20_000,
    ),  # a gateway that vanished without a word is noticed by pings
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 64 << 20),  # bytes: rows of logits of a whole prompt
    ("grpc.use_local_subchannel_pool", 1),  # channels with equal options would share one connection
    WITHOUT_PROXY,
)
CALL_SECONDS = 30.0  # for a unary call
FORK_SECONDS = 600.0  # for a fork: where servers cannot copy the KV, they compute the log


def parse_address(gateway: str) -> tuple[str, bool]:
    """Return `host:port` and whether TLS is used. Raise UserError."""
    if not isinstance(gateway, str):
        raise UserError("gateway", f"a {type(gateway).__name__}; allowed: {_ALLOWED}")
    scheme, split, rest = gateway.partition("://")
    address = rest.rstrip("/") if split else gateway
    if split and scheme not in _SECURE:
        raise UserError("gateway", f"{gateway!r} has the scheme {scheme!r}; allowed: {_ALLOWED}")
    try:
        parts = urlsplit(f"//{address}")
        is_whole = bool(parts.hostname and parts.port and "@" not in address)
        is_whole = is_whole and parts.netloc == address
    except ValueError:  # the port is no number, or brackets do not match
        is_whole = False
    if not is_whole:
        raise UserError("gateway", f"{gateway!r} is no address; allowed: {_ALLOWED}")
    return address, split != "" and _SECURE[scheme]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its gateway lists it. 0 and "": not known yet."""

    name: str
    context: int = 0  # positions of a request
    n_blocks: int = 0
    hidden_size: int = 0  # numbers of a row of hidden states
    dtype: str = ""  # of rows
    parent: str = ""  # the model that it is an adapter of; empty: it is a model
    takes_block_rows: bool = False  # all its servers add rows inside of their blocks
    vocab_size: int = 0  # token ids are below it

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * (4 if self.dtype == "float32" else 2)


class Connection:
    """The Inference service of one gateway. Threads may share it."""

    def __init__(self, gateway: str | None = None) -> None:
        """Connect lazily. `gateway` None: that of MODELSWARM_GATEWAY, else 127.0.0.1:8001."""
        given = (
            gateway if gateway is not None else os.environ.get(GATEWAY_VARIABLE) or DEFAULT_GATEWAY
        )
        self.target, is_secure = parse_address(given)
        self._channels = Channels(partial(_make_channel, self.target, is_secure))
        self._end = weakref.finalize(self, self._channels.close)

    def close(self) -> None:
        self._end()

    @property
    def is_of_this_process(self) -> bool:
        """Return False in the child of a fork, where it cannot be used."""
        return self._channels.is_of_this_process

    def check_process(self) -> None:
        """Raise UserError in the child of a fork."""
        self._channels.check_process()

    def list_models(self) -> dict[str, ServedModel]:
        """Return the served models by their names."""
        try:
            answer = self._channels.stub.ListModels(
                api_pb2.ListModelsRequest(), timeout=CALL_SECONDS
            )
        except grpc.RpcError as error:
            raise translate(error, self.target) from error
        return {
            model.id: ServedModel(
                model.id,
                model.max_model_len,
                model.n_blocks,
                model.hidden_size,
                model.dtype,
                model.parent,
                model.block_rows,
                model.vocab_size,
            )
            for model in answer.models
        }

    def fork_session(self, model: str, session: str, name: str, position: int) -> None:
        """Open the session `name` with the first `position` entries of `session`'s log. Raise a typed error."""
        fork = api_pb2.Fork(session_id=name, position=position)
        request = api_pb2.ForkSessionRequest(model=model, session_id=session, fork=fork)
        try:
            self._channels.stub.ForkSession(request, timeout=FORK_SECONDS)
        except grpc.RpcError as error:
            raise translate(error, self.target) from error

    def stream(self, request: api_pb2.GenerateRequest) -> Iterator[api_pb2.GenerateResponse]:
        """Start an answer, and return its call: an iterator of parts that can be cancelled."""
        call: Iterator[api_pb2.GenerateResponse] = self._channels.start(
            lambda stub: stub.GenerateStream(request)
        )
        return call

    def stream_session(self, requests: Iterator[api_pb2.SessionRequest]) -> Any:
        """Start a session, and return its call: an iterator of answers that can be cancelled."""
        return self._channels.start(lambda stub: stub.Session(requests))

    def stream_pass(self, requests: Iterator[api_pb2.BlockPassRequest]) -> Any:
        """Start a pass through blocks, and return its call: an iterator of answers that can be cancelled."""
        return self._channels.start(lambda stub: stub.BlockPass(requests))


def connect_to(url: str, field: str, cure: str) -> Connection:
    """Return a connection to the gRPC port of the gateway at a URL.

    `field`, `cure`: argument that needs it, and what helps without such a port. Raise UserError if there is none,
    UnreachableError if no gateway answers.
    """
    parts = urlsplit(url)
    port = announced_grpc_port(url)
    if port is None:
        detail = f"start it with --grpc, or {cure}"
        raise UserError(field, f"the gateway at {url} has no gRPC port; {detail}")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return Connection(f"{parts.scheme}://{host}:{port}")


def _make_channel(target: str, is_secure: bool) -> grpc.Channel:
    if is_secure:
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(), options=_OPTIONS)
    return grpc.insecure_channel(target, options=_OPTIONS)
