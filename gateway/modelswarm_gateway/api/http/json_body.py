"""Reads the body of an HTTP request as a JSON value, or raises an error that describes the problem."""

from __future__ import annotations

import asyncio
import json
import sys

from starlette.requests import ClientDisconnect, Request

from modelswarm_gateway.errors import ApiError, Code, invalid_request, shorten

MAX_BODY_BYTES = 16 << 20  # bytes
BODY_SECONDS = 60.0


async def read_json(request: Request) -> object:
    """Read and parse the body. Raise ApiError."""
    _check_encoding(request.headers.get("content-encoding", "identity"))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await _read(request)
    except TimeoutError as error:
        raise invalid_request(
            None, f"the body did not arrive within {BODY_SECONDS:.0f} seconds"
        ) from error
    except ClientDisconnect as error:
        raise ApiError(Code.CANCELLED, "the client left") from error
    return parse_json(raw)


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        detail = (
            f"Content-Encoding: {shorten(encoding)} bodies are not read; send the body uncompressed"
        )
        raise ApiError(Code.UNSUPPORTED_MEDIA_TYPE, detail)


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(Code.TOO_LARGE, f"the body may have {MAX_BODY_BYTES >> 20} MiB at most")


def parse_json(raw: bytes) -> object:
    """Parse a body in UTF-8. Raise ApiError."""
    if not raw.strip():
        raise invalid_request(None, "the body is empty; a JSON object is needed")
    try:
        value: object = json.loads(raw.decode())
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
