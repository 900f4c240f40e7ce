"""`Response`: one answer of a pipeline, or a part of it, with LMDeploy's fields."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. An item of a stream has the text and the tokens that are new since the item before it."""

    text: str
    generate_token_len: int  # tokens of the answer so far, an end token included
    input_token_len: int  # tokens of the prompt; 0: not known yet
    finish_reason: str | None = None  # stop, length or error; None: the stream goes on
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None  # per token: id -> natural logarithm
    index: int = 0  # place of the prompt in its list
    error: Exception | None = None  # with `raise_errors=False`: the reason for the missing answer

    @property
    def error_message(self) -> str | None:
        """The sentence about the error; None without one."""
        return None if self.error is None else str(self.error)


def failed(index: int, error: Exception) -> Response:
    """Return the response in place of an answer that could not be given."""
    return Response("", 0, 0, "error", index=index, error=error)
