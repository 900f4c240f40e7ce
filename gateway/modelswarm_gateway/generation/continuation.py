"""Continues a named session: one rule for clients that send the whole input, and for those that send only new input.

- **Whole input** (the default): if the session's log is a prefix of the input, the session continues behind its log.
  Otherwise it continues from the longest common prefix of both, and the rest of the log is discarded.
- **New input only** (`append: true`): the input goes behind the log. With `session_position` it goes behind so many
  entries, and the rest is discarded. A session that is gone is an error, because the input is not all of it.

Used by the service. The core finds the common prefix (`Session.replace_log`); this module makes the input whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.errors import ApiError, Code


def append_to_log(
    kept: ParkedTurn | None,
    new: Sequence[int],
    position: int | None,
    tokenizer: str,
    *,
    is_chat: bool,
) -> tuple[int, ...]:
    """Return the whole input: the log's first `position` entries (None: all) and the new ones. Raise ApiError.

    `is_chat`: a template wrote the new ones. Its text before a message begins with the end token of the last answer,
    which the log may have already. Token ids and texts of a client are appended as they are. `tokenizer`: digest of the
    one that wrote the new ones.
    """
    if kept is None:
        raise session_expired()
    if kept.tokens:
        check_tokenizer(kept, tokenizer)
    if position is None:
        position = len(kept.tokens)
    if position > len(kept.tokens):
        detail = (
            f"session_position: {position} is more than the {len(kept.tokens)} entries that are left of this "
            "session; append at one of them, or send the whole input without append"
        )
        raise ApiError(Code.SESSION_LOST, detail, param="session_position")
    log = kept.tokens[:position]
    if is_chat and log and new and new[0] == log[-1] and log[-1] in kept.turn.sampling.eos:
        new = new[1:]
    return (*log, *new)


def session_expired() -> ApiError:
    detail = "session_id: this session is gone, so only new input is not enough; send the whole input without append"
    return ApiError(Code.SESSION_EXPIRED, detail, param="session_id")


def check_tokenizer(kept: ParkedTurn, tokenizer: str) -> None:
    """Raise ApiError if the log's tokens stand for other texts now: `tokenizer` is the digest of the present one."""
    if kept.tokenizer not in ("", tokenizer):
        detail = (
            "session_id: the tokenizer of this model was replaced, so the log of this session cannot be "
            "continued; send the whole input without append"
        )
        raise ApiError(Code.SESSION_EXPIRED, detail, param="session_id")


def session_exists() -> ApiError:
    detail = "session_id: a session of this name exists; close it, or choose another name"
    return ApiError(Code.SESSION_EXISTS, detail, param="session_id")


def append_unknown() -> ApiError:
    detail = (
        "the gateway of this session was lost, and it is not known whether the input was appended; "
        "repeat it with session_position, which is safe at any time"
    )
    return ApiError(Code.APPEND_UNKNOWN, detail, param="session_position")


def appended_prompt(kept: ParkedTurn | None, new: Sequence[int]) -> tuple[int, ...]:
    """Return the prompt of the kept turn if it ends with this input, else the input itself, which resumes nothing."""
    if kept is not None:
        prompt = kept.tokens[: kept.turn.begin]
        for ending in (tuple(new), tuple(new[1:])):
            if ending and prompt[-len(ending) :] == ending:
                return prompt
    return tuple(new)
