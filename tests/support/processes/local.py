"""Plans for small swarms on this machine, for tests that start real processes with `LocalSwarm`.

`with LocalSwarm(plan(folder, spans=2, replicas=2), HASH) as swarm:` starts in about two seconds (no torch);
without HASH the same with the transformer, in about ten.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.placement.plan import SwarmPlan
from modelswarm.resources.spec import ModelSwarm

HASH = LocalSettings(hash_model=True, publish=False)
TORCH = LocalSettings(publish=False)


def document(folder: Path, name: str = "tiny", **spec: Any) -> dict[str, Any]:
    """A swarm document for a model folder."""
    return {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": name},
        "spec": {"model": {"source": f"file://{folder}"}, **spec},
    }


def plan(folder: Path, *, spans: int, replicas: int, name: str = "tiny", **spec: Any) -> SwarmPlan:
    content = document(folder, name, spans={"count": spans}, replicas=replicas, **spec)
    return plan_document(ModelSwarm.parse(content))


def write_document(path: Path, folder: Path, **spec: Any) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps(document(folder, **spec)), encoding="utf-8")
    return path
