"""Runs packed rows through a loaded span by the model class's own forward: the reference of the self-check.

Used once by `self_check.py`, before `fusion.py` takes the weights over. Attention inside is that of `attention.py`.
Knows no steps.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from modelswarm_serving.model.transformer.loading import LoadedSpan


def reference_forward(loaded: LoadedSpan, rows: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """Run rows [T, hidden] through the span's first `blocks` blocks."""
    view = _first_blocks(loaded.body, blocks)
    output = view(
        inputs_embeds=rows.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _first_blocks(body: Any, count: int) -> Any:
    """Return the base model with its first `count` layers; all modules are shared."""
    view = copy.copy(body)
    view._modules = dict(body._modules)
    view._modules["layers"] = nn.ModuleList(list(body.layers)[:count])
    config = copy.copy(body.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    view.config = config
    return view
