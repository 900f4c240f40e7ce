"""The document of examples/counting.yaml, as text for installed packages without an examples folder. Used by `demo`."""

from __future__ import annotations

from pathlib import Path

import modelswarm
from modelswarm.resources.loading import load_document, parse_document
from modelswarm.resources.spec import ModelSwarm

EXAMPLE_FILE = Path(modelswarm.__file__).parent.parent / "examples" / "counting.yaml"
EXAMPLE_TEXT = """
apiVersion: modelswarm.io/v1alpha1
kind: ModelSwarm
metadata:
  name: counting
spec:
  model:
    source: demo://counting
  spans:
    count: 2
  replicas: 2
  sessions:
    concurrent: 8
"""


def load_example() -> ModelSwarm:
    """Read the file if it exists, so that a change to it is used; else the same text."""
    return (
        load_document(EXAMPLE_FILE)
        if EXAMPLE_FILE.is_file()
        else parse_document(EXAMPLE_TEXT, "the example")
    )
