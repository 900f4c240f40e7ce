"""An address that accepts connections and says nothing is told, and not waited for as for an answer."""

from __future__ import annotations

import asyncio

import pytest

from modelswarm.client.api import AsyncClient, ConnectionBrokenError, async_client


async def test_silence_ends_the_request_for_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_client, "READ_SECONDS", 0.1)
    asked, ended = [], asyncio.Semaphore(0)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.release()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncClient(f"http://127.0.0.1:{port}", max_retries=1) as client:
        with pytest.raises(ConnectionBrokenError, match="was silent too long"):
            await client.models()
        for _ in range(2):
            await ended.acquire()
    assert asked == [b"GET /v1/models HTTP/1.1\r\n"] * 2
