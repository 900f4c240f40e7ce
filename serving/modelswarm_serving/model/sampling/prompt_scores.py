"""Log probabilities of a prompt's tokens, by the unchanged logits. Used by the tail's span."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelswarm.protocol.messages import PromptLogprob, TopLogprob


def score_tokens(logits: Tensor, targets: Sequence[int], top: int) -> list[PromptLogprob]:
    """Return the log probability of one target for each row of `logits` [n, vocab], and the `top` best tokens."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    wanted = torch.tensor(targets, device=logits.device)[:, None]
    found = logprobs.gather(1, wanted)[:, 0].tolist()
    best, ids = torch.topk(logprobs, min(top, logprobs.shape[1]), dim=-1)
    return [
        PromptLogprob(token, logprob, tuple(map(TopLogprob, tokens, values)))
        for token, logprob, tokens, values in zip(
            targets, found, ids.tolist(), best.tolist(), strict=True
        )
    ]
