"""Log probabilities in OpenAI's two shapes: a list of entries (chat), and parallel lists (text completions).

Used by the response builders. Knows tokens only by their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modelswarm_gateway.generation.logprobs import TokenLogprob

BytesOf = Callable[[int], bytes]


def chat_logprobs(entries: Sequence[TokenLogprob], bytes_of: BytesOf) -> dict[str, Any]:
    """Return `logprobs` of a chat choice. A token that is a part of a character has replacement characters."""
    content = [
        {
            **_chat_entry(entry.token, entry.logprob, bytes_of),
            "top_logprobs": [_chat_entry(top.token, top.logprob, bytes_of) for top in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token: int, logprob: float | None, bytes_of: BytesOf) -> dict[str, Any]:
    raw = bytes_of(token)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def completion_logprobs(entries: Sequence[TokenLogprob], bytes_of: BytesOf) -> dict[str, Any]:
    """Return `logprobs` of a text completion. The sampled token is always among `top_logprobs`."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            tops.append(None)
            continue
        top = {token_text(each.token, bytes_of): each.logprob for each in entry.top}
        tops.append(top | {token_text(entry.token, bytes_of): entry.logprob})
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": [token_text(entry.token, bytes_of) for entry in entries],
        "top_logprobs": tops,
    }


def token_text(token: int, bytes_of: BytesOf) -> str:
    r"""Return the text of a token, or `bytes:\xe2\x82` for a part of a character, as OpenAI writes it."""
    raw = bytes_of(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
