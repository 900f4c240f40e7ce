"""Reads JSON files of a model folder, with errors that the user can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modelswarm.errors import ModelSourceError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file; ModelSourceError if there is none."""
    if not path.is_file():
        raise ModelSourceError("model", f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelSourceError("model", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelSourceError("model", f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelSourceError("model", f"{path} must hold a JSON object")
    return content
