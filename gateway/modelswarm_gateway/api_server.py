"""Reads from a Kubernetes API server: a raw list, a raw watch, every wait with a deadline.

Used by `pod_watch.py`. `kubernetes.aio` gives the connection, the certificates and the token that is read anew every
minute; its typed objects would stop the event loop for a second per thousand pods, so answers are plain JSON. Knows
nothing of pods.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.config.config_exception import ConfigException

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 15.0  # for all of an answer that is no watch
MOST_BYTES = 16 << 20  # of one event
IN_A_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class Unreachable(Exception):
    """No answer, or only a part of one."""


class Answered(Exception):
    """The API server said no. `retry_after` is what it asked for, in seconds."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message, self.retry_after = status, message, retry_after


class ApiServer:
    def __init__(self, kubeconfig: Path | None) -> None:
        """`kubeconfig` None: the one of the pod this process runs in, else the default file."""
        self._kubeconfig = kubeconfig
        self._in_a_pod = kubeconfig is None and IN_A_POD.exists()
        self._client: kubernetes_client.ApiClient | None = None

    async def check(self) -> None:
        """Unreachable when nothing says where the API server is."""
        await self._connected()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def get(self, path: str, query: Mapping[str, str]) -> Any:
        """The parsed JSON of the answer. Raises Unreachable or Answered."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, connect=CONNECT_SECONDS)
        async with self._asked(path, query, timeout) as response:
            return _parsed(await response.read())

    async def watch(
        self, path: str, query: Mapping[str, str], seconds: float
    ) -> AsyncGenerator[Any, None]:
        """Each event's parsed JSON until the server ends it. Unreachable when that takes longer than `seconds`."""
        timeout = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)
        async with self._asked(path, query, timeout) as response:
            rest = b""
            async for part in response.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line:
                        yield _parsed(line)
                if len(rest) > MOST_BYTES:
                    raise Unreachable("an event of a watch is too large")

    @asynccontextmanager
    async def _asked(
        self, path: str, query: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        client = await self._connected()
        try:
            _, url, headers, _, _ = await client.param_serialize(
                "GET",
                path,
                query_params=list(query.items()),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
            )
            answer = await client.rest_client.request(
                "GET", url, headers=headers, _request_timeout=timeout
            )
            async with answer.response as response:
                if response.status != 200:
                    raise await _refusal(response)
                yield response
        except (aiohttp.ClientError, OSError, ConfigException) as error:  # TimeoutError too
            if isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
                await self.close()  # certificates are read when a client is made, and may be new
            raise Unreachable(_why(error)) from error

    async def _connected(self) -> kubernetes_client.ApiClient:
        if self._client is None:
            self._client = kubernetes_client.ApiClient(await self._configuration())
        return self._client

    async def _configuration(self) -> kubernetes_client.Configuration:
        made = kubernetes_client.Configuration()
        made.connection_pool_maxsize = 0  # no limit: each watch keeps one connection
        try:
            if self._in_a_pod:
                kubernetes_config.load_incluster_config(client_configuration=made)
            else:
                await kubernetes_config.load_kube_config(
                    config_file=None if self._kubeconfig is None else str(self._kubeconfig),
                    client_configuration=made,
                    persist_config=False,
                )
        except (ConfigException, OSError, TypeError, ValueError) as error:
            raise Unreachable(f"nothing says where the API server is: {error}") from error
        return made


async def _refusal(response: aiohttp.ClientResponse) -> Answered:
    """What the API server says is wrong."""
    body = await response.read()
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace") or str(response.reason)
    try:
        pause = float(response.headers.get("Retry-After", 0))
    except ValueError:
        pause = 0.0
    return Answered(response.status, str(message), pause)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unreachable("an answer is no JSON, or only a part of one") from error


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
