"""The model of `--model`, among those that the gateway serves."""

from __future__ import annotations

from collections.abc import Sequence

from modelswarm.client.api.answers import ServedModel
from modelswarm.errors import UnavailableError, UserError


def choose_model(served: Sequence[ServedModel], name: str | None) -> ServedModel:
    """Return the model of that name, by default the first one. UserError names those that are served."""
    if not served:
        raise UnavailableError("the gateway serves no model yet")
    for model in served:
        if name in (None, model.name):
            return model
    known = ", ".join(model.name for model in served)
    raise UserError("--model", f"{name!r} is not served here; known are: {known}")
