"""Which cluster the person chose: ours, or with `CLUSTER=existing` the one behind `KUBECONFIG`."""

from __future__ import annotations

import os
from pathlib import Path


def existing_kubeconfig() -> Path | None:
    if os.environ.get("CLUSTER") != "existing":
        return None
    given = os.environ.get("KUBECONFIG")
    if not given:
        raise SystemExit("CLUSTER=existing needs KUBECONFIG: the file that leads to the cluster")
    return Path(given)
