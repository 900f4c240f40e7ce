"""Prints one object as one line of JSON. Used by every command with `--json`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from modelswarm.process.json_text import to_json


def print_json(fields: Mapping[str, Any]) -> None:
    """Print an object as one line at once."""
    sys.stdout.write(f"{to_json(fields)}\n")
    sys.stdout.flush()
