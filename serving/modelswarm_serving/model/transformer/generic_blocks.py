"""Runs packed rows through a loaded span by the model class's own forward, with the attention of `attention.py`.

The path of every family without a fused form, and the reference of the self-check for those with one. It keeps the
modules of the checkpoint as transformers loaded them. Knows no steps.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from modelswarm_serving.model.attention.step_layout import RowLayout


class GenericBlocks:
    """The span's blocks, ready to run any part of them."""

    def __init__(self, body: Any, blocks: str) -> None:
        """`blocks`: name of the list of blocks in the base model."""
        self._body, self._blocks = body, blocks
        self._views: dict[tuple[int, int], Any] = {}

    def run(self, rows: Tensor, layout: RowLayout, start: int, end: int) -> Tensor:
        """Run rows [T, hidden] through blocks [start, end), counted from the span's first block."""
        output = self._view(start, end)(
            inputs_embeds=rows.unsqueeze(0),
            position_ids=layout.positions.unsqueeze(0),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _view(self, start: int, end: int) -> Any:
        """Return the base model with these blocks only; all modules are shared."""
        view = self._views.get((start, end))
        if view is None:
            view = self._views[start, end] = copy.copy(self._body)
            view._modules = dict(self._body._modules)
            view._modules[self._blocks] = nn.ModuleList(
                list(getattr(self._body, self._blocks))[start:end]
            )
            view.config = copy.copy(self._body.config)
            view.config.num_hidden_layers = end - start
            if getattr(view.config, "layer_types", None):
                view.config.layer_types = view.config.layer_types[start:end]
        return view
