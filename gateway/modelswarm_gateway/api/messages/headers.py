"""Anthropic's request headers: the version, and the names of betas, which change what a request means.

`x-api-key` is not read, like `authorization`: the gateway knows no users.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelswarm_gateway.errors import ApiError, Code, invalid_field, shorten
from modelswarm_gateway.generation.resumption import LAST_EVENT_ID

ANTHROPIC_VERSION, BETA = "anthropic-version", "anthropic-beta"
VERSIONS = ("2023-06-01", "2026-10-21")
# Betas that ask for nothing that this server does otherwise; each field of a beta is checked on its own.
HARMLESS_BETAS = {
    "claude-code": "sent by a client to name itself",
    "context-1m": "the context is as long as the model's",
    "extended-cache-ttl": "there is no cache to keep",
    "fine-grained-tool-streaming": "arguments are always sent as they are made",
    "interleaved-thinking": "reasoning is shown where the model writes it",
    "model-context-window-exceeded": "the stop reason exists",
    "output-128k": "the answer may fill the context",
    "output-300k": "the answer may fill the context",
    "prompt-caching": "there is no cache to keep",
    "structured-outputs": "output_config.format is obeyed",
    "thinking-token-count": "usage has the tokens of reasoning",
    "token-counting": "the route exists",
    "token-efficient-tools": "the model's own format of calls is used",
}


def check_messages_headers(headers: Mapping[str, str], beta_query: str | None) -> None:
    """Raise ApiError for a version or a beta that this server does not have.

    `beta_query`: Anthropic's client adds `?beta=true` to requests with betas.
    """
    if beta_query not in (None, "true"):
        raise invalid_field("beta", "must be true; leave the query parameter out")
    version = headers.get(ANTHROPIC_VERSION)
    if version is not None and version not in VERSIONS:
        detail = f"{shorten(version)!r} is not known; send {VERSIONS[-1]} or leave it out"
        raise ApiError(Code.UNSUPPORTED, f"{ANTHROPIC_VERSION}: {detail}", param=ANTHROPIC_VERSION)
    for name in headers.get(BETA, "").split(","):
        beta = name.strip()
        if beta and _without_date(beta) not in HARMLESS_BETAS:
            allowed = ", ".join(HARMLESS_BETAS)
            detail = (
                f"the beta {shorten(beta)!r} is not supported; leave it out; allowed: {allowed}"
            )
            raise ApiError(Code.UNSUPPORTED, f"{BETA}: {detail}", param=BETA)
    if LAST_EVENT_ID in headers:
        detail = "only streams of POST /v1/chat/completions and /v1/completions can be resumed"
        raise ApiError(Code.UNSUPPORTED, f"{LAST_EVENT_ID}: {detail}", param=LAST_EVENT_ID)


def wants_messages_shape(headers: Mapping[str, str], beta_query: str | None) -> bool:
    """Return whether a request to `/v1/models` comes from Anthropic's client. Raise ApiError as above."""
    if ANTHROPIC_VERSION in headers:
        check_messages_headers(headers, beta_query)
        return True
    if beta_query is not None:
        detail = f"it has an effect only beside the header {ANTHROPIC_VERSION}; leave it out"
        raise invalid_field("beta", detail)
    return False


def _without_date(beta: str) -> str:
    """Return the name of a beta without its date, which is its last three parts, or its last one: 20250219."""
    parts = beta.split("-")
    while parts and parts[-1].isdigit():
        parts.pop()
    return "-".join(parts)
