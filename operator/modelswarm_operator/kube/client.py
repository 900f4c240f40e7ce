"""Requests to the API server: plain dicts in, plain dicts out, a deadline on each.

Called by everything that reads or writes, except the watches (kopf has its own connection and takes its
credentials from here). Uses `kubernetes.aio` for configuration, TLS and tokens, and never its models: decoding a
list of pods into them blocks the loop for a second. Knows no resource.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from modelswarm.errors import UserError
from modelswarm_operator.kube.errors import ApiError, UnauthorizedError, UnavailableError, error_of
from modelswarm_operator.reconcile.state.observed import Json

SECONDS = 10.0  # for one request; a list gets longer
LIST_SECONDS = 60.0
PAGE = 500  # objects of a list in one answer
LONG = 1 << 16  # bytes of an answer

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
JSON = "application/json"

Seen = Callable[[str, str, int, float], None]  # verb, path, code (0: no answer), seconds


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """From the file, or from the pod's service account. Raises UserError: one sentence."""
    loaded = Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=loaded)
        else:
            await config.load_kube_config(str(kubeconfig), client_configuration=loaded)
    except (config.ConfigException, OSError) as error:
        where = "in-cluster" if kubeconfig is None else str(kubeconfig)
        raise UserError("--kubeconfig", f"{where} cannot be used: {error}") from None
    loaded.connection_pool_maxsize = 32
    return loaded


class Api:
    """One connection pool per process. `fence` runs before every write and raises if it must not happen."""

    def __init__(self, kubeconfig: Path | None, configuration: Configuration, seen: Seen) -> None:
        self._kubeconfig = kubeconfig
        self._client = ApiClient(configuration)
        self._client.user_agent = "modelswarm-operator"
        self._seen = seen
        self._reload = asyncio.Lock()
        self.fence: Callable[[], None] = lambda: None

    @property
    def configuration(self) -> Configuration:
        loaded: Configuration = self._client.configuration
        return loaded

    async def close(self) -> None:
        await self._client.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        return await self._request("GET", path, query=query)

    async def list_all(self, path: str, query: Mapping[str, str]) -> tuple[list[Json], int]:
        """Every object and the list's resourceVersion, page by page, as of one moment."""
        items: list[Json] = []
        following = ""
        while True:
            page = {**query, "limit": str(PAGE), **({"continue": following} if following else {})}
            found = await self._request("GET", path, query=page, seconds=LIST_SECONDS)
            items += found.get("items") or []
            following = found["metadata"].get("continue") or ""
            if not following:
                return items, int(found["metadata"]["resourceVersion"])

    async def post(self, path: str, body: Json, *, strict: bool = False) -> Json:
        """`strict`: fields that the API server does not know are refused, not dropped."""
        query = {"fieldValidation": "Strict"} if strict else None
        return await self._write("POST", path, body, query=query)

    async def put(self, path: str, body: Json) -> Json:
        return await self._write("PUT", path, body)

    async def patch(self, path: str, body: Json) -> Json:
        return await self._write("PATCH", path, body, kind=MERGE)

    async def apply(self, path: str, body: Json, manager: str) -> Json:
        query = {"fieldManager": manager, "force": "true"}
        return await self._write("PATCH", path, body, kind=APPLY, query=query)

    async def delete(self, path: str, uid: str, grace_seconds: int | None = None) -> Json:
        """Only the object with this uid: another one of the same name is a ConflictError."""
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._write("DELETE", path, body)

    async def send(self, verb: str, path: str, body: Json, seconds: float = SECONDS) -> Json:
        """Past the fence: for the lease itself, and for questions that are asked by a POST."""
        return await self._request(verb, path, body=body, seconds=seconds)

    async def _write(
        self,
        verb: str,
        path: str,
        body: Json,
        kind: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> Json:
        self.fence()
        return await self._request(verb, path, query=query, body=body, kind=kind)

    async def _request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        kind: str = JSON,
        seconds: float = SECONDS,
    ) -> Json:
        async def once() -> Json:
            return await self._once(verb, path, query or {}, body, kind, seconds)

        try:
            return await once()
        except UnauthorizedError:
            return await self._with_new_credentials(once)

    async def _with_new_credentials(self, once: Callable[[], Awaitable[Json]]) -> Json:
        """A token is rotated by writing its file again; what is refused after that is refused."""
        async with self._reload:
            fresh = await load_configuration(self._kubeconfig)
            self.configuration.api_key = fresh.api_key
            self.configuration.refresh_api_key_hook = fresh.refresh_api_key_hook
        return await once()

    async def _once(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None,
        kind: str,
        seconds: float,
    ) -> Json:
        started, code = time.monotonic(), 0
        try:
            request = await self._client.param_serialize(
                verb,
                path,
                query_params=list(query.items()),
                header_params={"Accept": JSON, "Content-Type": kind},
                body=body,
                auth_settings=["BearerToken"],
            )
            timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=5)
            answer = await self._client.call_api(*request, _request_timeout=timeout)
            code = answer.status
            text = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            what = f"{verb} {path}: no answer: {str(error) or type(error).__name__}"
            raise UnavailableError(0, "", what) from None
        finally:
            self._seen(verb, path, code, time.monotonic() - started)
        return _document(code, text, answer.headers.get("Retry-After"))


def _document(code: int, text: bytes, retry_after: str | None) -> Json:
    try:
        document: Any = _loads(text) if text else {}
    except ValueError:
        if code < 300:
            raise UnavailableError(code, "", "the answer is not JSON") from None
        document = {"message": text[:200].decode(errors="replace")}
    if code >= 300:
        raise error_of(code, document, retry_after)
    if not isinstance(document, dict):
        raise ApiError(code, "", "the answer is not an object")
    return document


def _loads(text: bytes) -> Any:
    """A long list is many objects and no cycle: looking for cycles meanwhile would take twice as long as reading it."""
    if len(text) < LONG or not gc.isenabled():
        return json.loads(text)
    gc.disable()
    try:
        return json.loads(text)
    finally:
        gc.enable()
