"""Checks of what a caller gives, before anything is sent. All raise BadRequestError with the field's name."""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any
from urllib.parse import urlsplit

from modelswarm.client.api.errors import BadRequestError, bad_request

URL_VARIABLE = "MODELSWARM_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
MAX_SESSION_NAME = 256  # characters
# Fields that are counts, with their smallest values.
_COUNTS = {"max_tokens": 0, "max_completion_tokens": 0, "min_tokens": 0, "n": 1, "top_logprobs": 0}
# Names of other libraries or of chats, whose nearest spelling here is another field.
_MEANT = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
_OF_THE_METHOD = {
    "stream": "the method decides it; use stream_complete or stream_chat",
    "stream_options": "the client always asks for the usage",
}


def check_urls(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the URLs of the gateways, without `/v1`. Default: MODELSWARM_URL, with commas between."""
    if given is None:
        given = os.environ.get(URL_VARIABLE) or DEFAULT_URL
        given = given.split(",")
    urls = [given] if isinstance(given, str) else given
    is_list = isinstance(urls, Sequence) and not isinstance(urls, bytes)
    if not is_list or not all(isinstance(url, str) for url in urls):
        detail = f"give a URL such as {DEFAULT_URL}, or a list of URLs"
        raise bad_request("base_url", f"{given!r} is not allowed; {detail}")
    if not urls:
        raise bad_request("base_url", "the list is empty; give at least one URL of a gateway")
    return tuple(_check_url(url) for url in urls)


def _check_url(url: str) -> str:
    text = url.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    is_text = text.isprintable() and " " not in text
    if not is_good or not is_text or parts.query or parts.fragment:
        raise bad_request("base_url", f"{url!r} is no URL such as {DEFAULT_URL}")
    return text


def check_fields(given: Mapping[str, Any], known: Iterable[str], call: str) -> dict[str, Any]:
    """Return the fields that are set; None means unset. `call` names the method in errors."""
    known = frozenset(known)
    for name in given:
        if name in known:
            continue
        if name in _OF_THE_METHOD:
            raise bad_request(name, f"not a field of {call}: {_OF_THE_METHOD[name]}")
        meant = [_MEANT[name]] if _MEANT.get(name) in known else []
        near = meant or difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else "; docs/reference/fields.md has all fields"
        raise bad_request(name, f"unknown field of {call}{hint}")
    fields = {name: value for name, value in given.items() if value is not None}
    for name, least in _COUNTS.items():
        if name in fields:
            fields[name] = check_count(name, fields[name], least)
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise bad_request(name, f"it must be a number, not {value}")
    if "session_id" in fields:
        check_session_name(fields["session_id"])
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in fields:
            fields[name] = check_tokens(name, fields[name])
    if fields.get("append") and "session_id" not in fields:
        raise bad_request("append", "it needs session_id, the session that goes on")
    return fields


def check_count(name: str, value: object, least: int) -> int:
    number = _as_int(value)
    if number is None or number < least:
        raise bad_request(name, f"{value!r} is not allowed; send a whole number from {least}")
    return number


def check_session_name(name: object) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_SESSION_NAME:
        detail = f"a session's name is a string of 1 to {MAX_SESSION_NAME} characters"
        raise bad_request("session_id", f"{name!r} is not allowed; {detail}")
    return name


def check_prompt(prompt: object) -> str | list[int]:
    """Return the prompt as JSON takes it: a text, or a list of token ids from 0."""
    if isinstance(prompt, str):
        if not prompt:
            raise bad_request("prompt", "it is empty; send a text or token ids")
        return prompt
    tokens = check_tokens("prompt", prompt)
    if not tokens:
        raise bad_request("prompt", "it is empty; send a text or token ids")
    return tokens


def check_tokens(name: str, tokens: object) -> list[int]:
    """Return token ids as a list of int. Accept numpy's and torch's vectors of integers, too."""
    if isinstance(tokens, str | bytes | Mapping | Set) or not isinstance(tokens, Iterable):
        raise bad_request(name, f"{type(tokens).__name__} is not allowed; send a list of token ids")
    checked = []
    for place, token in enumerate(tokens):
        number = _as_int(token)
        if number is None or number < 0:
            detail = "a token id is a whole number from 0"
            raise bad_request(f"{name}[{place}]", f"{token!r} is not allowed; {detail}")
        checked.append(number)
    return checked


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages of a chat as JSON takes them."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        example = '[{"role": "user", "content": "Hi"}]'
        kind = type(messages).__name__
        raise bad_request("messages", f"{kind} is not allowed; send a list such as {example}")
    checked = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise _bad_message(place)
        checked.append(dict(message))
    if not checked:
        raise bad_request("messages", "the list is empty; send at least one message")
    return checked


def _bad_message(place: int) -> BadRequestError:
    return bad_request(f"messages[{place}]", "a message is an object with role and content")


def check_limits(timeout: float, max_retries: int, max_connections: int) -> None:
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not timeout > 0:
        raise bad_request("timeout", f"{timeout!r} is not allowed; send seconds above 0")
    check_count("max_retries", max_retries, 0)
    check_count("max_connections", max_connections, 1)


def check_api_key(api_key: object) -> None:
    """Raise BadRequestError for a key that no header can hold."""
    is_text = isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()
    if api_key is not None and (not is_text or not api_key or api_key != str(api_key).strip()):
        detail = "send printable ASCII characters without spaces around them, or None"
        raise bad_request("api_key", f"it is not allowed; {detail}")


def check_callback(name: str, callback: object) -> None:
    if callback is not None and not callable(callback):
        raise bad_request(name, f"{callback!r} is not allowed; give a function, or None")
