"""A swarm of one model for one process: nothing else on this machine finds it, and no document is needed.

Used by `generate --checkpoint-path` and by `pipeline()`. Starts nothing by itself: `LocalSwarm` does.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelswarm.errors import UserError

if TYPE_CHECKING:
    from modelswarm.local.swarm import LocalSwarm

_NEEDED = ("torch", "fastapi")  # packages of servers and gateways
_SCHEMES = ("hf://", "file://", "demo://")
_NUMBERS = itertools.count(1)  # of this process's swarms; each has a folder of its own


def missing_package() -> str | None:
    """Return a package that servers or gateways need and that is not installed; None if all are there."""
    return next((package for package in _NEEDED if find_spec(package) is None), None)


def known_address(model: str) -> str | None:
    """Return the address of a folder, or the address that is given; None: it may be a name on the hub."""
    if model.startswith(_SCHEMES):
        return model
    if not model:  # Python would take it for the current folder
        return None
    path = Path(os.path.expanduser(model))  # pathlib fails for the home of an unknown user
    return path.resolve().as_uri() if path.is_dir() else None


def private_swarm(
    name: str,
    model: Mapping[str, Any],
    spec: Mapping[str, Any],
    *,
    memory: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
) -> LocalSwarm:
    """Return a swarm that is not started; `name` is also the served name.

    `model`, `spec`: fields of `spec.model` and of `spec`. `memory`: of one server, such as 8Gi. UserError names the
    field of the document that cannot be used.
    """
    from pydantic import ValidationError

    from modelswarm.local.commands import LocalSettings
    from modelswarm.local.planning import plan_document
    from modelswarm.local.swarm import LocalSwarm
    from modelswarm.resources.spec import API_VERSION, KIND, ModelSwarm
    from modelswarm.resources.violations import list_violations

    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {**spec, "model": {**model, "servedName": name}},
    }
    try:
        swarm = ModelSwarm.parse(document)
    except ValidationError as error:
        field, _, sentence = list_violations(error, ModelSwarm)[0].partition(": ")
        raise UserError(field, sentence) from None
    plan = plan_document(swarm, memory, device)
    settings = LocalSettings(
        threads=threads,
        device=device,
        publish=False,
        run_name=f"{name}-{os.getpid()}-{next(_NUMBERS)}",
    )
    return LocalSwarm(plan, settings)
