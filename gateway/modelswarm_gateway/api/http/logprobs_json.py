"""Log probabilities in OpenAI's two shapes: a list of entries (chat), and parallel lists (text completions).

Those of a prompt have vLLM's shape. Used by the response builders. Knows tokens only by their bytes. An entry with 20
alternatives takes some 0.1 ms to make and encode, so entries are made one by one while the response is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from modelswarm.protocol.messages import PromptLogprob
from modelswarm_gateway.generation.output.logprobs import TokenLogprob

BytesOf = Callable[[int], bytes]
Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class LazyList(Generic[Source]):
    """A list of a JSON value whose entries are made when they are read."""

    source: Sequence[Source]
    make: Callable[[Source], object]

    def __iter__(self) -> Iterator[object]:
        return map(self.make, self.source)


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

    def make(entry: TokenLogprob) -> dict[str, Any]:
        tops = [_chat_entry(top.token, top.logprob, names) for top in entry.top]
        return {**_chat_entry(entry.token, entry.logprob, names), "top_logprobs": tops}

    return {"content": LazyList(entries, make), "refusal": None}


def _chat_entry(token: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    raw = list(names.bytes_of(token))
    return {"token": names.chat_name(token), "logprob": logprob, "bytes": raw}


def completion_logprobs(entries: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """Return `logprobs` of a text completion. The sampled token is always among `top_logprobs`."""

    def top_of(entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top = {names.completion_name(each.token): each.logprob for each in entry.top}
        return top | {names.completion_name(entry.token): entry.logprob}

    return {
        "text_offset": LazyList(entries, lambda entry: entry.offset),
        "token_logprobs": LazyList(entries, lambda entry: entry.logprob),
        "tokens": LazyList(entries, lambda entry: names.completion_name(entry.token)),
        "top_logprobs": LazyList(entries, top_of),
    }


def prompt_logprobs(
    scores: Sequence[PromptLogprob], count: int, names: TokenNames
) -> LazyList[PromptLogprob | None]:
    """Return the entries of a prompt's tokens; the first one follows nothing and has none.

    Each has the token itself and the `count` most probable ones. The rank of a token that is not among them is null.
    """

    def make(score: PromptLogprob | None) -> dict[str, Any] | None:
        return None if score is None else _prompt_entry(score, count, names)

    return LazyList([None, *scores], make)


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
