"""Runs a run of blocks over packed rows by the model's own forward.

Holds one view of the model per block range that was asked for (a session may use only a part of a span). Used by
`span.py`; attention inside is `attention.py`'s.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from modelswarm_serving.model.loading import LoadedSpan


class Blocks:
    def __init__(self, loaded: LoadedSpan) -> None:
        self._body = loaded.body
        self._views: dict[tuple[int, int], nn.Module] = {}

    def run(self, rows: Tensor, positions: Tensor, start: int, end: int) -> Tensor:
        """[T, hidden] through the span's blocks [start, end), counted from the span's first."""
        view = self._views.get((start, end)) or self._view(start, end)
        output = view(
            inputs_embeds=rows.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _view(self, start: int, end: int) -> nn.Module:
        """The base model with fewer layers; all modules are shared."""
        layers = self._body.layers
        assert isinstance(layers, nn.ModuleList)
        view = copy.copy(self._body)
        view._modules = dict(self._body._modules)
        view._modules["layers"] = nn.ModuleList(list(layers)[start:end])
        config: Any = copy.copy(self._body.config)
        config.num_hidden_layers = end - start
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[start:end]
        view.config = config
        self._views[(start, end)] = view
        return view
