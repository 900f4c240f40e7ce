"""A swarm of one model for one process: nothing else on this machine finds it, and no document is needed.

Used by `generate --checkpoint-path`. Starts nothing by itself: `LocalSwarm` does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from modelswarm.errors import UserError
from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.local.swarm import LocalSwarm
from modelswarm.resources.spec import API_VERSION, KIND, ModelSwarm

SERVED_NAME = "private"
_SCHEMES = ("hf://", "file://", "demo://")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?")


def private_swarm(
    checkpoint: str, tokenizer: str | None = None, spans: int = 1, device: str = "cpu"
) -> LocalSwarm:
    """Return a swarm that is not started, with one server for each of the spans.

    `checkpoint`, `tokenizer`: a folder in Hugging Face's format, a name on the hub, or an address as documents have
    it. UserError names the option that cannot be used.
    """
    model = {
        "source": _address(checkpoint, "--checkpoint-path"),
        "servedName": SERVED_NAME,
    }
    if tokenizer is not None:
        model["tokenizer"] = _address(tokenizer, "--tokenizer-name")
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": SERVED_NAME},
        "spec": {"model": model, "spans": {"count": spans}},
    }
    plan = plan_document(ModelSwarm.parse(document), device=device)
    settings = LocalSettings(
        threads=None, device=device, publish=False, run_name=f"{SERVED_NAME}-{os.getpid()}"
    )
    return LocalSwarm(plan, settings)


def _address(given: str, option: str) -> str:
    """Return an address for a folder, for a name on the hub, or the address that is given."""
    if given.startswith(_SCHEMES):
        return given
    path = Path(given).expanduser()
    if path.is_dir():
        return f"file://{path.resolve()}"
    allowed = "allowed: a folder in Hugging Face's format, or owner/name of a hub"
    if path.exists():
        raise UserError(option, f"{given} is a file; {allowed}")
    if not _HUB_NAME.fullmatch(given) or given.startswith("."):
        raise UserError(option, f"{given}: no such folder; {allowed}")
    return f"hf://{given}"
