"""Reads the body of an HTTP request as a JSON value, or raises an error that describes the problem."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from modelswarm_gateway.errors import ApiError, Code, client_left, invalid_request, shorten

MAX_BODY_BYTES = 16 << 20  # bytes
BODY_SECONDS = 60.0
# Bytes of a body that are always taken.
SMALL_BODY_BYTES = 64 << 10
# Bytes beyond those of all bodies that are read and parsed at a time.
MAX_LARGE_BYTES = 128 << 20
# JSON objects of a body. A message takes 7 us of the event loop, and may have 28 bytes.
MAX_OBJECTS = 1 << 16


class BodyBudget:
    """Bytes of large bodies at a time, as they arrive: clients may send for a minute, and any number of them may."""

    def __init__(self, most: int = MAX_LARGE_BYTES) -> None:
        self._most, self._taken = most, 0

    @contextlib.contextmanager
    def open_account(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that sets the size of one body. It raises ApiError if there is no room."""
        own = 0

        def resize(size: int) -> None:
            nonlocal own
            more = max(0, size - SMALL_BODY_BYTES) - own
            if self._taken + more > self._most:
                detail = "too many large bodies are being read; retry in 1 s"
                raise ApiError(Code.NO_CAPACITY, detail, retry_after=1.0)
            own, self._taken = own + more, self._taken + more

        try:
            yield resize
        finally:
            self._taken -= own


async def read_json(request: Request, budget: BodyBudget) -> object:
    """Read and parse the body. Raise ApiError."""
    _check_encoding(request.headers.get("content-encoding", "identity"))
    with budget.open_account() as resize:
        return parse_json(await _read_in_time(request, resize))


async def _read_in_time(request: Request, resize: Callable[[int], None]) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(request, resize)
    except TimeoutError as error:
        raise invalid_request(
            None, f"the body did not arrive within {BODY_SECONDS:.0f} seconds"
        ) from error
    except ClientDisconnect as error:
        raise client_left() from error


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        detail = (
            f"Content-Encoding: {shorten(encoding)} bodies are not read; send the body uncompressed"
        )
        raise ApiError(Code.UNSUPPORTED_MEDIA_TYPE, detail)


async def _read(request: Request, resize: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        resize(len(body))
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(Code.TOO_LARGE, f"the body may have {MAX_BODY_BYTES >> 20} MiB at most")


def parse_json(raw: bytes) -> object:
    """Parse a body in UTF-8. Raise ApiError."""
    if not raw.strip():
        raise invalid_request(None, "the body is empty; a JSON object is needed")
    try:
        value: object = json.loads(
            raw.decode(),
            object_hook=_ObjectCounter(),
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
        )
        if b"\\ud" in raw.lower():  # halves of a surrogate pair are JSON, but not text
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise invalid_request(
            None, f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from error
    except UnicodeEncodeError as error:
        raise invalid_request(
            None, "the body holds half of a surrogate pair, which is no character"
        ) from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise invalid_request(
            None, f"the body is not valid JSON: {error.msg} at {place}"
        ) from error
    except RecursionError as error:
        raise invalid_request(
            None, "the body is nested too deeply: a request needs fewer than ten levels"
        ) from error
    except ValueError as error:  # of int(): quadratic in the number of digits
        limit = sys.get_int_max_str_digits()
        raise invalid_request(
            None, f"the body has a whole number of more than {limit} digits"
        ) from error
    return value


class _ObjectCounter:
    """Passes the objects of a body on, up to MAX_OBJECTS."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, value: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        if self._count > MAX_OBJECTS:
            raise invalid_request(None, f"the body has more than {MAX_OBJECTS} JSON objects")
        return value


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise invalid_request(None, f"the body has the number {shorten(text)}, beyond 1.8e308")
    return value


def _refuse_constant(name: str) -> object:
    """Refuse what Python reads as a number: an answer that repeats it, as of a tool's schema, would not be JSON."""
    raise invalid_request(None, f"the body is not valid JSON: {name} is no number")
