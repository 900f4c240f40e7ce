"""`Response`: one answer of a pipeline, or a part of it, with LMDeploy's fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modelswarm.client.api.errors import ApiError, ConnectionBrokenError, NotAGatewayError
from modelswarm.errors import UserError

_CODES: tuple[tuple[type[Exception], str], ...] = (  # of errors that no gateway has named
    (UserError, "invalid_request"),
    (ConnectionBrokenError, "connection_broken"),
    (NotAGatewayError, "not_a_gateway"),
)


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
    # Tokens of the prompt whose KV the servers still had; of a stream only the last part of an answer knows it.
    cached_tokens: int = 0
    # Float32 tensors [rows, vocabulary] and [rows, hidden]; of a stream only the last part of an answer has them.
    logits: Any = field(default=None, compare=False)
    last_hidden_state: Any = field(default=None, compare=False)

    @property
    def error_message(self) -> str | None:
        """The sentence about the error; None without one."""
        return None if self.error is None else str(self.error)

    @property
    def error_code(self) -> str | None:
        """The stable name of the error, as in docs/api.md; None without an error, or if a proxy gave none."""
        if isinstance(self.error, ApiError) and self.error.code is not None:
            return self.error.code
        return next((code for kind, code in _CODES if isinstance(self.error, kind)), None)


def failed(index: int, error: Exception) -> Response:
    """Return the response in place of an answer that could not be given."""
    return Response("", 0, 0, "error", index=index, error=error)
