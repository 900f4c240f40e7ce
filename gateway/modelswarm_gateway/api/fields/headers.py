"""Request headers that would change an answer on another server, and that this one refuses by name.

Every other unknown header is ignored, as HTTP requires: proxies and clients add their own.
"""

from __future__ import annotations

from fastapi import Request

from modelswarm_gateway.errors import ApiError, Code

_ROUTES_ITSELF = "the gateway chooses the servers of a request itself"

REFUSED_HEADERS = {
    "idempotency-key": "answers are not kept for repetitions; a stream with a session_id is resumed by Last-Event-ID",
    "x-data-parallel-rank": _ROUTES_ITSELF,
    "x-data-parallel-host-port": _ROUTES_ITSELF,
    "x-prefiller-host-port": _ROUTES_ITSELF,
    "x-smg-target-worker": _ROUTES_ITSELF,
    "x-smg-routing-key": _ROUTES_ITSELF,
    "x-gateway-destination-endpoint": _ROUTES_ITSELF,
    "x-worker-instance-id": _ROUTES_ITSELF,
    "x-http-method-override": "send the request with that method",
}


def check_headers(request: Request) -> None:
    """Raise ApiError for a header that asks for something that this server does not do."""
    for name in REFUSED_HEADERS.keys() & request.headers.keys():
        detail = f"{name}: {REFUSED_HEADERS[name]}; leave the header out"
        raise ApiError(Code.UNSUPPORTED, detail, param=name)
