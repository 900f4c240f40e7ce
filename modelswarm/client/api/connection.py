"""Pooled connections to one or several gateways of a swarm, and the errors of a single try.

The first URL that answers is used until it fails; then the next one. Repeats nothing that may have been sent.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from modelswarm.client.api.errors import (
    ApiError,
    ClosedClientError,
    ConnectionBrokenError,
    ErrorFacts,
    GatewayUnreachableError,
    NotAGatewayError,
    bad_request,
    error_of,
)
from modelswarm.client.api.parsing import parse_with
from modelswarm.local.port_check import explain_answer

CONNECT_SECONDS = 5.0  # for a connection to one gateway
KEPT_SECONDS = 20.0  # of an idle connection; the gateway closes it after 30 s
STOPPING_CODE, UNKNOWN_MODEL_CODE = "gateway_stopping", "model_not_found"
Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a client's connections."""

    timeout: float  # seconds of silence in an answer
    max_connections: int  # further requests wait for a free one


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """An answer whose content has not been read, and the URL of its gateway."""

    http: httpx.Response
    url: str

    @property
    def request_id(self) -> str | None:
        found: str | None = self.http.headers.get("x-request-id")
        return found


class Connections:
    def __init__(self, urls: tuple[str, ...], api_key: str | None, limits: Limits) -> None:
        self._urls = urls
        self._first = 0  # index of the URL that is tried first
        self._limits = limits
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._answered: set[str] = set()  # URLs that have answered by HTTP, or are explained
        self.default_model: str | None = None  # of requests that name none; None: not known yet

    async def close(self) -> None:
        self._is_closed = True
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()

    def _client(self) -> httpx.AsyncClient:
        """Return the pool, which is made in the event loop of the first request."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise ClosedClientError("the client is closed; make a new one")
        if self._http is None:
            self._loop = loop
            most = self._limits.max_connections
            self._http = httpx.AsyncClient(
                limits=httpx.Limits(max_connections=most, keepalive_expiry=KEPT_SECONDS),
                headers=self._headers,
                verify=trusted_authorities(*self._urls),
                trust_env=False,
            )
        if loop is not self._loop:
            raise ClosedClientError(
                "the client belongs to another event loop; make one in each asyncio.run"
            )
        return self._http

    async def call(
        self,
        method: str,
        path: str,
        parse: Callable[[Any], Parsed],
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        silence: float | None = None,
    ) -> tuple[Parsed, str | None]:
        """Return the parsed answer and its request id. Raise ApiError."""
        async with self.stream(method, path, body, params=params, silence=silence) as opened:
            content = await opened.http.aread()
            try:
                return parse_with(parse, content), opened.request_id
            except ValueError:
                raise _not_a_gateway(opened.http) from None

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        silence: float | None = None,
    ) -> AsyncIterator[OpenAnswer]:
        """Yield an answer of status 200, whose content is read inside. Raise ApiError.

        `silence`: seconds without a byte until the connection counts as broken; by default the client's timeout.
        """
        content = None if body is None else _encode(body)
        sent = dict(headers or {}) | (
            {} if content is None else {"content-type": "application/json"}
        )
        answer, url = await self._send(method, path, content, sent, params, silence)
        try:
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                refusal = _refusal(answer)
                if refusal.code == STOPPING_CODE:
                    self.avoid(url)
                if refusal.code == UNKNOWN_MODEL_CODE:
                    self.default_model = None  # it may be served no more
                raise refusal
            yield OpenAnswer(answer, url)
        except httpx.TransportError as error:
            self.avoid(url)
            raise _broken(error, url, answer.headers.get("x-request-id")) from error
        finally:
            await answer.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        params: Mapping[str, str] | None,
        silence: float | None,
    ) -> tuple[httpx.Response, str]:
        """Send the request to the first gateway that can be connected to; return the answer's head, and the URL."""
        client = self._client()
        start = self._first
        seconds = min(silence or self._limits.timeout, self._limits.timeout)
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS, pool=self._limits.timeout)
        failure: httpx.TransportError | None = None
        for step in range(len(self._urls)):
            url = self._urls[(start + step) % len(self._urls)]
            request = client.build_request(
                method,
                f"{url}{path}",
                content=content,
                headers=dict(headers),
                params=params,
                timeout=timeout,
            )
            try:
                answer = await client.send(request, stream=True)
                self._answered.add(url)
                return answer, url
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if _is_tls_failure(error):
                    await self._explain(url, error)
                failure = error
                self.avoid(url)
            except httpx.PoolTimeout as error:
                message = f"all {self._limits.max_connections} connections of the client are busy"
                raise GatewayUnreachableError(message, url) from error
            except httpx.TransportError as error:
                if not isinstance(error, httpx.TimeoutException):
                    await self._explain(url, error)
                self.avoid(url)
                raise _broken(error, url, None) from error
        message = f"no gateway answers at {' or '.join(self._urls)}"
        if failure is not None and _is_tls_failure(failure):
            message += f" by TLS: {failure}"
        raise GatewayUnreachableError(message, self._urls[start]) from failure

    async def _explain(self, url: str, error: httpx.TransportError) -> None:
        """Raise NotAGatewayError if something else answers at a URL that has accepted a connection. Look once."""
        if url in self._answered:
            return
        self._answered.add(url)
        explanation = await asyncio.to_thread(explain_answer, url, "HTTP", is_proxied=True)
        if explanation is not None:
            self._answered.discard(url)
            raise NotAGatewayError(explanation, url) from error

    def avoid(self, url: str) -> None:
        """Try the URL behind this one first, if this one was."""
        if url == self._urls[self._first]:
            self._first = (self._first + 1) % len(self._urls)


def trusted_authorities(*urls: str) -> ssl.SSLContext:
    """Return a context of the authorities in SSL_CERT_FILE or SSL_CERT_DIR, else of certifi's. Raise BadRequestError.

    `trust_env=False`, which leaves proxies out, leaves out these variables, too. Without TLS in `urls` none are read.
    """
    if all(urlsplit(url).scheme == "http" for url in urls):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        reason = error.strerror or str(error)
        raise bad_request("SSL_CERT_FILE", f"it cannot be read: {reason}") from error


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        wrong = next((name for name, value in body.items() if not _is_json(value)), "request")
        raise bad_request(wrong, f"it cannot be written as JSON: {error}") from error


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _is_tls_failure(error: BaseException | None) -> bool:
    """Return whether a connection was accepted, and its TLS failed."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None


def _broken(error: httpx.TransportError, url: str, request_id: str | None) -> ApiError:
    cause = "was silent too long" if isinstance(error, httpx.ReadTimeout) else "broke"
    message = f"the connection to the gateway at {url} {cause}"
    return ConnectionBrokenError(message, url, ErrorFacts(request_id=request_id))


def _refusal(answer: httpx.Response) -> ApiError:
    """Return the error that an answer other than 200 describes."""
    facts = ErrorFacts(
        answer.status_code,
        request_id=answer.headers.get("x-request-id"),
        retry_after=_retry_after(answer.headers),
        should_retry={"true": True, "false": False}.get(answer.headers.get("x-should-retry", "")),
    )
    try:
        return parse_with(lambda body: envelope_error(body, facts), answer.content)
    except ValueError:
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return error_of(f"{_base(answer)} answers {answer.status_code}; check api_key", facts)
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
            return error_of(f"{_base(answer)} answers {answer.status_code}", facts)
        return _not_a_gateway(answer)


def envelope_error(body: Mapping[str, Any], facts: ErrorFacts) -> ApiError:
    """Return the error of an envelope `{"error": {"message", "param", "code"}}`."""
    error = body["error"]
    code, param = error.get("code"), error.get("param")
    known = ErrorFacts(
        facts.status,
        None if code is None else str(code),
        None if param is None else str(param),
        facts.request_id,
        facts.retry_after,
        facts.should_retry,
    )
    return error_of(str(error["message"]), known)


def _retry_after(headers: httpx.Headers) -> float | None:
    """Return the seconds that `retry-after-ms` or `retry-after` name, as a number or as a date."""
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            return max(0.0, float(value) * factor)
        except ValueError:
            parsed = email.utils.parsedate_tz(value)
        if parsed is not None:
            return max(0.0, email.utils.mktime_tz(parsed) - time.time())
    return None


def _base(answer: httpx.Response) -> str:
    url = answer.request.url
    return f"{url.scheme}://{url.netloc.decode()}"


def _not_a_gateway(answer: httpx.Response) -> NotAGatewayError:
    base = _base(answer)
    message = f"{base} answers {answer.status_code}, but not as a gateway does"
    facts = ErrorFacts(answer.status_code, request_id=answer.headers.get("x-request-id"))
    return NotAGatewayError(message, base, facts)
