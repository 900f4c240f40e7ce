"""Answers of the API server that kopf can read, however deeply an object is nested.

kopf parses lists and events itself. One object of more levels than Python's json reads would end all its watches, and
again after each start. So what lies below MAX_LEVELS is null, as in the answers that `KubeClient` reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from typing_extensions import override

from modelswarm.kube.client import cut_levels, read_json


class ShallowResponse(aiohttp.ClientResponse):
    """The response class of the session that kopf uses."""

    @override
    async def start(self, *arguments: Any, **named: Any) -> aiohttp.ClientResponse:
        response = await super().start(*arguments, **named)
        self.content = _Lines(self.content)  # type: ignore[assignment]
        return response

    @override
    async def json(self, **ignored: Any) -> Any:
        """Return a list, or the body of an error; None without a body."""
        text = await self.read()
        return read_json(text) if text.strip() else None


class _Lines:
    """A stream whose chunks are whole lines, the events of a watch. All else is the stream's."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for part in self._content.iter_chunked(size):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield cut_levels(line) + b"\n"
