"""The document of examples/counting.yaml, for an installed package, which has no examples folder. Used by `demo`."""

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
    """The file where there is one, so that a change to it is seen; the same text otherwise."""
    return load_document(EXAMPLE_FILE) if EXAMPLE_FILE.is_file() else parse_document(EXAMPLE_TEXT, "the example")
