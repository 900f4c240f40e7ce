"""Checks of the tensors that `generate` gets, and their rows without padding. Knows no servers."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.integers import is_integer
from modelswarm.client.sessions.errors import SessionLengthError

Rows: TypeAlias = "list[list[int]]"

_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_ids(ids: Tensor, vocabulary: int, name: str = "input_ids") -> Tensor:
    """Return `ids` [batch, length] as int64. Raise ArgumentError for shapes, dtypes and ids that no model has."""
    if not isinstance(ids, Tensor):
        raise ArgumentError(name, f"a {type(ids).__name__}; allowed: a tensor of token ids")
    if ids.is_meta or ids.layout is not torch.strided:
        kind = "on the meta device" if ids.is_meta else "sparse"
        raise ArgumentError(name, f"the tensor is {kind}; allowed: a dense tensor with token ids")
    if ids.dim() != 2:
        detail = "allowed: [batch, length]; a single prompt is ids[None]"
        raise ArgumentError(name, f"the shape is {list(ids.shape)}; {detail}")
    if ids.dtype not in _DTYPES:
        raise ArgumentError(name, f"the dtype is {ids.dtype}; allowed: integers")
    if not ids.numel():
        raise ArgumentError(name, f"the shape is {list(ids.shape)}; allowed: at least 1 token")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        detail = f"the vocabulary has the ids 0 to {vocabulary - 1}"
        raise ArgumentError(name, f"{wrong} is no token of the model; {detail}")
    return ids.long()


def check_mask(mask: Tensor, ids: Tensor) -> None:
    """Raise ArgumentError for a mask that is not one of `ids`, or that hides the end of a row."""
    if not isinstance(mask, Tensor):
        raise ArgumentError("attention_mask", f"a {type(mask).__name__}; allowed: a tensor")
    if mask.shape != ids.shape:
        detail = f"allowed: that of input_ids, {list(ids.shape)}"
        raise ArgumentError("attention_mask", f"the shape is {list(mask.shape)}; {detail}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ArgumentError("attention_mask", "allowed values: 0 for padding, 1 for tokens")
    if not bool((mask[:, -1] == 1).all()):
        detail = "rows must be padded on the left (padding_side='left' of the tokenizer)"
        raise ArgumentError("attention_mask", f"a row ends with padding; {detail}")


def check_forward_mask(mask: Tensor | None, ids: Tensor, pad: int | None, before: int = 0) -> None:
    """Raise ArgumentError for a mask that is not one of `before` positions and `ids`, or that hides all of `ids`.

    Padding may be on both sides. Without a mask, no row may begin with padding: a forward pass infers none.
    """
    if mask is None:
        if not before:
            _check_begins(ids, pad, "and a forward pass infers no mask")
        return
    if not isinstance(mask, Tensor) or list(mask.shape) != [len(ids), before + ids.shape[1]]:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        allowed = f"that of input_ids, {list(ids.shape)}"
        if before:
            allowed = f"{[len(ids), before + ids.shape[1]]}, {before} positions of the cache first"
        raise ArgumentError("attention_mask", f"the shape is {shape}; allowed: {allowed}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ArgumentError("attention_mask", "allowed values: 0 for padding, 1 for tokens")
    if not bool(mask[:, before:].any()):
        detail = "allowed: at least one token in the batch"
        raise ArgumentError("attention_mask", f"all of input_ids is padding; {detail}")


def kept_logits(keep: Any, length: int) -> int:
    """Return how many of the last positions have logits; 0 keeps all. Raise ArgumentError for other values."""
    if keep is None:
        return length
    if not is_integer(keep) or keep < 0:
        detail = "allowed: 0 for all positions, or a number of the last ones"
        raise ArgumentError("logits_to_keep", f"{keep!r}; {detail}")
    return min(keep or length, length)


def check_context(length: int, context: int) -> None:
    """Raise SessionLengthError for an input that is longer than the context; 0: it is not known."""
    if context and length > context:
        detail = f"the context of the swarm has {context}"
        raise SessionLengthError("input_ids", f"{length} positions are too many; {detail}")


def check_length(length: Any, context: int) -> None:
    """Raise SessionLengthError for a session that is longer than the context; 0: it is not known."""
    if context and isinstance(length, int) and length > context:
        detail = f"the context of the swarm has {context} positions"
        raise SessionLengthError("max_length", f"{length} is too many; {detail}")


def check_training_mask(mask: Tensor | None, ids: Tensor, pad: int | None) -> None:
    """Raise ArgumentError as `check_forward_mask` does, and for a mask that hides a whole row."""
    check_forward_mask(mask, ids, pad)
    if mask is not None and not bool(mask.any(-1).all()):
        raise ArgumentError("attention_mask", "a row has no token that is not padding")


def check_labels(labels: Tensor | None, ids: Tensor, vocabulary: int) -> None:
    """Raise ArgumentError for labels that are no token ids of the inputs' shape, or -100."""
    if labels is None:
        return
    if not isinstance(labels, Tensor) or labels.shape != ids.shape:
        shape = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        detail = f"allowed: that of input_ids, {list(ids.shape)}"
        raise ArgumentError("labels", f"the shape is {shape}; {detail}")
    if labels.dtype != torch.int64:
        raise ArgumentError("labels", f"the dtype is {labels.dtype}; allowed: torch.int64")
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= vocabulary))]
    if wrong.numel():
        detail = f"the vocabulary has the ids 0 to {vocabulary - 1}, and -100 leaves a position out"
        raise ArgumentError("labels", f"{int(wrong[0])} is no token of the model; {detail}")


def end_tokens(config: Any) -> list[int]:
    """Return the end tokens of a GenerationConfig, which may be one id, several, a tensor or None."""
    eos = config.eos_token_id
    found = eos.tolist() if isinstance(eos, Tensor) else eos
    if isinstance(found, (list, tuple)):
        return list(found)
    return [] if found is None else [found]


def check_padding(ids: Tensor, pad: int | None, eos: list[int]) -> None:
    """Raise ArgumentError for rows that seem to be padded, if no mask says so and `generate` infers none."""
    if pad in eos:  # else transformers infers the mask
        _check_begins(ids, pad, "which is also an end token")


def infer_mask(ids: Tensor, pad: int | None, eos: list[int]) -> Tensor | None:
    """Return the mask that transformers infers for inputs without one; None if it infers no padding.

    Raise ArgumentError for rows that end with padding.
    """
    if pad is None or pad in eos:
        return None
    mask = (ids != pad).long()
    if bool(mask.all()) or not bool(mask.any(-1).all()):
        return None
    check_mask(mask, ids)
    return mask


def _check_begins(ids: Tensor, pad: int | None, reason: str) -> None:
    if pad is None or len(ids) < 2:
        return
    begins = ids[:, 0] == pad
    if bool(begins.any()) and not bool(begins.all()):
        detail = "pass attention_mask=, that of the tokenizer's result"
        raise ArgumentError(
            "attention_mask", f"rows begin with pad_token_id {pad}, {reason}; {detail}"
        )


def split_rows(ids: Tensor, mask: Tensor | None) -> Rows:
    """Return the token ids of each row without its padding."""
    if mask is None:
        return [row.tolist() for row in ids]
    return [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]


def pad_rows(rows: Rows, pad: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return rows [batch, length] padded on the left, and their mask; None if none has padding."""
    length = max(map(len, rows))
    ids = [[pad] * (length - len(row)) + row for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    is_padded = any(len(row) < length for row in rows)
    return torch.tensor(ids, device=device), torch.tensor(
        mask, device=device
    ) if is_padded else None
