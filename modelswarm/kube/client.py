"""Client of a Kubernetes API server: plain dicts in, plain dicts out, a deadline on each request.

Used by the gateway (list and watch of pods) and by the operator (everything but its watches). Those are kopf's, which
takes its credentials from `load_configuration`. `kubernetes.aio` gives configuration, TLS and tokens. Its typed
objects are never used: decoding a thousand pods into them blocks the event loop for a second. Knows no resource.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from modelswarm.kube.errors import KubeError, UnauthorizedError, UnreachableError, error_of

Json = dict[str, Any]
T = TypeVar("T")

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 10.0  # for a whole answer that is neither a list nor a watch
LIST_SECONDS = 60.0  # for one page of a list
PAGE_SIZE = 500  # objects of a list in one answer
LONG_ANSWER_BYTES = 1 << 16  # longer answers are parsed without garbage collection
MAX_EVENT_BYTES = 16 << 20  # of one event of a watch

SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
JSON = "application/json"

_NO_JSON = "is not JSON, or only a part of it"
# Levels of an answer that are read; a spec may have fewer. The API server stores 10,000 in open fields, such as a pod
# template's. Python's json reads some 1,000, so one such object would end every list and watch.
MAX_LEVELS = 400
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]')  # or a text, which may contain some

RecordCall = Callable[[str, str, int, float], None]
"""Called after each request but watches: verb, path, HTTP status (0: no answer), seconds."""


def is_in_pod() -> bool:
    """True if this process runs in a pod that has a service account."""
    return SERVICE_ACCOUNT_TOKEN.exists()


async def load_configuration(kubeconfig: Path | None, *, in_cluster: bool = True) -> Configuration:
    """Return address and credentials: from the file, or from the pod's service account without one.

    Neither a file nor `in_cluster`: from the user's default file. Raises UnreachableError if they cannot be read.
    """
    loaded = Configuration()
    try:
        if kubeconfig is None and in_cluster:
            config.load_incluster_config(client_configuration=loaded)
        else:
            await config.load_kube_config(
                config_file=None if kubeconfig is None else str(kubeconfig),
                client_configuration=loaded,
                persist_config=False,  # two loaders of one process must not write the same file
            )
    except (config.ConfigException, OSError, TypeError, ValueError) as error:
        raise UnreachableError(f"no usable kubeconfig or service account: {error}") from error
    return loaded


class KubeClient:
    """One connection pool. `fence` runs before every write: it returns the seconds that the write may take.

    It raises if the write must not happen.
    """

    def __init__(
        self,
        kubeconfig: Path | None,
        *,
        user_agent: str,
        in_cluster: bool = True,
        max_connections: int = 0,
        record_call: RecordCall = lambda verb, path, code, seconds: None,
    ) -> None:
        """`kubeconfig` and `in_cluster`: see `load_configuration`. `max_connections` 0: no limit."""
        self._kubeconfig = kubeconfig
        self._in_cluster = in_cluster
        self._user_agent = user_agent
        self._max_connections = max_connections
        self._record_call = record_call
        self._client: ApiClient | None = None
        self._loading = asyncio.Lock()
        self.fence: Callable[[], float] = lambda: REQUEST_SECONDS

    async def connect(self) -> None:
        """Load address and credentials. Raises UnreachableError if there are none. Sends nothing."""
        await self._connected()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        return await self._request("GET", path, query=query)

    async def list_all(
        self,
        path: str,
        query: Mapping[str, str],
        page_size: int = PAGE_SIZE,
        seconds: float = LIST_SECONDS,
    ) -> tuple[list[Json], str]:
        """Return all objects and the list's resourceVersion, read page by page, as of one moment.

        `seconds` is the deadline of each page.
        """
        items: list[Json] = []
        following = ""
        while True:
            page = {
                **query,
                "limit": str(page_size),
                **({"continue": following} if following else {}),
            }
            found = await self._request("GET", path, query=page, seconds=seconds)
            try:
                items += found["items"] or ()
                version, following = (
                    found["metadata"]["resourceVersion"],
                    found["metadata"].get("continue"),
                )
            except (KeyError, TypeError, AttributeError) as error:
                raise UnreachableError(f"GET {path}: the answer is not a list") from error
            if not following:
                return items, str(version)

    async def watch(
        self, path: str, query: Mapping[str, str], seconds: float
    ) -> AsyncGenerator[Any, None]:
        """Yield each event's parsed JSON until the server ends the watch. Raises UnreachableError after `seconds`."""
        opened = self._translate_errors("GET", path)
        async with opened, await self._open_watch(path, query, seconds) as response:
            rest = b""
            async for part in response.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line:
                        yield _parse_event(line)
                if len(rest) > MAX_EVENT_BYTES:
                    raise UnreachableError("an event of a watch is too large")

    async def post(self, path: str, body: Json, *, strict: bool = False) -> Json:
        """`strict`: fields that the API server does not know are refused, not dropped."""
        query = {"fieldValidation": "Strict"} if strict else None
        return await self._write("POST", path, body, query=query)

    async def put(self, path: str, body: Json) -> Json:
        return await self._write("PUT", path, body)

    async def patch(self, path: str, body: Json) -> Json:
        return await self._write("PATCH", path, body, content_type=MERGE_PATCH)

    async def apply(self, path: str, body: Json, manager: str) -> Json:
        query = {"fieldManager": manager, "force": "true"}
        return await self._write("PATCH", path, body, content_type=APPLY_PATCH, query=query)

    async def delete(self, path: str, uid: str, grace_seconds: int | None = None) -> Json:
        """Delete only the object with this uid: another one of the same name is a ConflictError."""
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._write("DELETE", path, body)

    async def send(
        self, verb: str, path: str, body: Json, seconds: float = REQUEST_SECONDS
    ) -> Json:
        """Write without the fence: for the Lease itself, and for questions that are asked by a POST."""
        return await self._request(verb, path, body=body, seconds=seconds)

    async def _write(
        self,
        verb: str,
        path: str,
        body: Json,
        content_type: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> Json:
        seconds = min(REQUEST_SECONDS, self.fence())
        return await self._request(
            verb, path, query=query, body=body, content_type=content_type, seconds=seconds
        )

    async def _request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = JSON,
        seconds: float = REQUEST_SECONDS,
    ) -> Json:
        async def request_once() -> Json:
            return await self._request_once(verb, path, query or {}, body, content_type, seconds)

        return await self._with_fresh_credentials(request_once)

    async def _request_once(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None,
        content_type: str,
        seconds: float,
    ) -> Json:
        started, code = time.monotonic(), 0
        sent = self._send(verb, path, query, body, content_type, seconds)
        try:
            async with self._translate_errors(verb, path), await sent as response:
                code = response.status
                text = await response.read()
        finally:
            self._record_call(verb, path, code, time.monotonic() - started)
        return _document(code, text, response.headers.get("Retry-After"))

    async def _open_watch(
        self, path: str, query: Mapping[str, str], seconds: float
    ) -> aiohttp.ClientResponse:
        async def open_once() -> aiohttp.ClientResponse:
            response = await self._send("GET", path, query, None, JSON, seconds)
            if response.status >= 300:
                async with response:
                    text = await response.read()
                _document(response.status, text, response.headers.get("Retry-After"))
            return response

        return await self._with_fresh_credentials(open_once)

    async def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None,
        content_type: str,
        seconds: float,
    ) -> aiohttp.ClientResponse:
        client = await self._connected()
        request = await client.param_serialize(
            verb,
            path,
            query_params=list(query.items()),
            header_params={"Accept": JSON, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await client.call_api(*request, _request_timeout=self._timeout(seconds))
        response: aiohttp.ClientResponse = answer.response
        return response

    def _timeout(self, seconds: float) -> aiohttp.ClientTimeout:
        """`connect` counts the wait for a free connection too, so it is only set where the pool has no limit."""
        connect = None if self._max_connections else CONNECT_SECONDS
        return aiohttp.ClientTimeout(total=seconds, connect=connect, sock_connect=CONNECT_SECONDS)

    async def _with_fresh_credentials(self, request: Callable[[], Awaitable[T]]) -> T:
        """Run the request; after a 401, load the credentials again and run it once more.

        A token is rotated by writing its file again. A second 401 is final.
        """
        try:
            return await request()
        except UnauthorizedError:
            await self._reload_credentials()
            return await request()

    async def _reload_credentials(self) -> None:
        async with self._loading:
            fresh = await load_configuration(self._kubeconfig, in_cluster=self._in_cluster)
            if self._client is not None:
                current: Configuration = self._client.configuration
                current.api_key = fresh.api_key
                current.refresh_api_key_hook = fresh.refresh_api_key_hook

    @asynccontextmanager
    async def _translate_errors(self, verb: str, path: str) -> AsyncIterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError, config.ConfigException) as error:  # TimeoutError too
            if isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
                await self.close()  # certificates are read when a client is made, and may be new
            cause = str(error) or type(error).__name__
            raise UnreachableError(f"{verb} {path}: no answer: {cause}") from error

    async def _connected(self) -> ApiClient:
        if self._client is not None:
            return self._client
        async with self._loading:
            if self._client is None:
                loaded = await load_configuration(self._kubeconfig, in_cluster=self._in_cluster)
                loaded.connection_pool_maxsize = self._max_connections
                self._client = ApiClient(loaded)
                self._client.user_agent = self._user_agent
            return self._client


def _document(code: int, text: bytes, retry_after: str | None) -> Json:
    try:
        document: Any = _parse(text) if text else {}
    except (ValueError, RecursionError):
        if code < 300:
            raise UnreachableError(f"the answer {_NO_JSON}") from None
        document = {"message": text[:200].decode(errors="replace")}
    if code >= 300:
        raise error_of(code, document, retry_after)
    if not isinstance(document, dict):
        raise KubeError(code, "", "the answer is not an object")
    return document


def read_json(text: bytes) -> Any:
    """Parse JSON; what is nested below MAX_LEVELS is null. ValueError or RecursionError if it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(cut_levels(text))


def cut_levels(text: bytes) -> bytes:
    """Return the JSON with null for what is nested below MAX_LEVELS."""
    if text.count(b"[") + text.count(b"{") <= MAX_LEVELS:
        return text
    parts, level, begin = [], 0, 0
    for bracket in _BRACKET.finditer(text):
        if bracket[0] in b"{[":
            level += 1
            if level == MAX_LEVELS + 1:
                parts.append(text[begin : bracket.start()])
        elif bracket[0] in b"}]":
            if level == MAX_LEVELS + 1:
                parts.append(b"null")
                begin = bracket.end()
            level -= 1
    return b"".join((*parts, text[begin:]))


def _parse(text: bytes) -> Any:
    """Parse JSON, a long text without garbage collection.

    A long list is many objects and no cycle. Looking for cycles meanwhile takes twice as long as parsing.
    """
    if len(text) < LONG_ANSWER_BYTES or not gc.isenabled():
        return read_json(text)
    gc.disable()
    try:
        return read_json(text)
    finally:
        gc.enable()


def _parse_event(line: bytes) -> Any:
    try:
        return read_json(line)
    except (ValueError, RecursionError) as error:
        raise UnreachableError(f"an event of a watch {_NO_JSON}") from error
