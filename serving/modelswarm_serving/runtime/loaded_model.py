"""The model that a server process has loaded, with all that the node needs of it. Made by `app.py`."""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm_serving.model.base import Model
from modelswarm_serving.model.passes.contract import PassRunner
from modelswarm_serving.runtime.model_files import ModelFiles


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    files: ModelFiles  # offered to gateways
    revision: str
    passes: PassRunner | None = None  # None: the model has no gradients
    training_memory: int = 0  # bytes of passes
