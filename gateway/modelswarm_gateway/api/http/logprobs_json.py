"""Log probabilities in OpenAI's two shapes: a list of entries (chat), and parallel lists (text completions).

Those of a prompt have vLLM's shape. Used by the response builders. Knows tokens only by their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modelswarm.protocol.messages import PromptLogprob
from modelswarm_gateway.generation.logprobs import TokenLogprob

BytesOf = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class TokenNames:
    """The texts that stand for tokens."""

    bytes_of: BytesOf
    as_ids: bool = False  # token_id:5 in place of a text

    def chat_name(self, token: int) -> str:
        """Return the text; a part of a character is shown by replacement characters."""
        return _id_name(token) if self.as_ids else self.bytes_of(token).decode(errors="replace")

    def completion_name(self, token: int) -> str:
        return _id_name(token) if self.as_ids else token_text(token, self.bytes_of)


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def chat_logprobs(entries: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """Return `logprobs` of a chat choice. A token that is a part of a character has replacement characters."""
    content = [
        {
            **_chat_entry(entry.token, entry.logprob, names),
            "top_logprobs": [_chat_entry(top.token, top.logprob, names) for top in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    raw = list(names.bytes_of(token))
    return {"token": names.chat_name(token), "logprob": logprob, "bytes": raw}


def completion_logprobs(entries: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """Return `logprobs` of a text completion. The sampled token is always among `top_logprobs`."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            tops.append(None)
            continue
        top = {names.completion_name(each.token): each.logprob for each in entry.top}
        tops.append(top | {names.completion_name(entry.token): entry.logprob})
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": [names.completion_name(entry.token) for entry in entries],
        "top_logprobs": tops,
    }


def prompt_logprobs(
    scores: Sequence[PromptLogprob], count: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """Return the entries of a prompt's tokens; the first one follows nothing and has none.

    Each has the token itself and the `count` most probable ones. The rank of a token that is not among them is null.
    """
    return [None] + [_prompt_entry(score, count, names) for score in scores]


def _prompt_entry(score: PromptLogprob, count: int, names: TokenNames) -> dict[str, Any]:
    ranked = {top.token: (rank, top.logprob) for rank, top in enumerate(score.top[:count], 1)}
    own = ranked.get(score.token, (None, score.logprob))
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": names.chat_name(token)}
        for token, (rank, logprob) in ({score.token: own} | ranked).items()
    }


def token_text(token: int, bytes_of: BytesOf) -> str:
    r"""Return the text of a token, or `bytes:\xe2\x82` for a part of a character, as OpenAI writes it."""
    raw = bytes_of(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
