"""Log probabilities of a prompt's tokens, by the unchanged logits. Used by the tail's span.

The host waits once per step for a device, for the scores of all requests together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelswarm.protocol.messages import PromptLogprob, TopLogprob
from modelswarm_serving.model.attention.staging import to_host, to_index


def score_tokens(logits: Tensor, targets: Sequence[int], top: int) -> Tensor:
    """Return [n, 1 + 2 top] in float64 on the device, for one target of each row of `logits` [n, vocab].

    Columns: the target's log probability, then ids and log probabilities of the `top` best tokens.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    wanted = to_index(targets, logits.device)[:, None]
    best = torch.topk(logprobs, min(top, logprobs.shape[1]), dim=-1)
    columns = (logprobs.gather(1, wanted), best.indices, best.values)
    return torch.cat([each.double() for each in columns], dim=1)


def read_scores(
    tables: Sequence[Tensor], targets: Sequence[Sequence[int]]
) -> list[tuple[PromptLogprob, ...]]:
    """Return the scores of each table [n, 1 + 2 top] with its targets, by one copy to the host."""
    flat = to_host(torch.cat([table.flatten() for table in tables]))
    parts = torch.split(flat, [table.numel() for table in tables])
    return [
        tuple(map(_read_row, wanted, part.view(table.shape).tolist()))
        for table, wanted, part in zip(tables, targets, parts, strict=True)
    ]


def _read_row(token: int, row: Sequence[float]) -> PromptLogprob:
    top = len(row) // 2
    ids = map(int, row[1 : 1 + top])
    return PromptLogprob(token, row[0], tuple(map(TopLogprob, ids, row[1 + top :])))
