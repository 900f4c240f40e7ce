"""The channels to one gateway: a new one where all others have as many streams as a gateway allows.

A gateway allows 128 concurrent streams on a connection (HTTP/2, RFC 9113 section 5.1.2). gRPC lets further calls wait
in the client without an error, so a batch whose rows begin together would never begin.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import grpc

from modelswarm.errors import UserError
from modelswarm.protocol.wire import api_pb2_grpc

STREAMS_PER_CHANNEL = 100  # below the gateway's limit: its health checks and lists need some


class Channels:
    """Channels of one client to one gateway. Threads may share them."""

    def __init__(self, make: Callable[[], grpc.Channel]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._pid = os.getpid()
        self._channels: list[grpc.Channel] = []
        self._stubs: list[Any] = []
        self._streams: list[int] = []  # running ones, by channel
        self._add()

    @property
    def stub(self) -> Any:
        """The stub for unary calls."""
        self.check_process()
        return self._stubs[0]

    def start(self, call: Callable[[Any], Any]) -> Any:
        """Start a stream by `call`, which gets the stub of the channel with the fewest streams. Return the stream."""
        self.check_process()
        with self._lock:
            place = min(range(len(self._streams)), key=self._streams.__getitem__)
            if self._streams[place] >= STREAMS_PER_CHANNEL:
                place = self._add()
            self._streams[place] += 1
        try:
            stream = call(self._stubs[place])
        except BaseException:  # no stream: the channel has room for another one
            self._release(place)
            raise
        if not stream.add_callback(lambda: self._release(place)):
            self._release(place)
        return stream

    @property
    def is_of_this_process(self) -> bool:
        """Return False in the child of a fork, which has none of gRPC's threads."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """End all streams. In the child of a fork it does nothing: the connections are those of its parent."""
        if self.is_of_this_process:
            for channel in self._channels:
                channel.close()

    def check_process(self) -> None:
        """Raise UserError in the child of a fork, where a call would wait for ever."""
        if not self.is_of_this_process:
            detail = "the connection was made in another process; make one in this process"
            raise UserError("gateway", detail)

    def _add(self) -> int:
        channel = self._make()
        self._channels.append(channel)
        self._stubs.append(api_pb2_grpc.InferenceStub(channel))
        self._streams.append(0)
        return len(self._streams) - 1

    def _release(self, place: int) -> None:
        with self._lock:
            self._streams[place] -= 1
