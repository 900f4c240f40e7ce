"""Namespaces for tests: new names, restricted pods only, and a default ServiceAccount also without controllers.

Used by the fixtures and by tests that need several. Works with any cluster.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from tools.devcluster.control_plane.kubectl import Kubectl


def make_namespace(kubectl: Kubectl, prefix: str = "test", *, enforce: str = "restricted") -> str:
    """Make a namespace with that Pod Security level (privileged, baseline or restricted), and return its name."""
    name = f"{prefix}-{uuid.uuid4().hex[:8]}"
    levels = {f"pod-security.kubernetes.io/{mode}": enforce for mode in ("enforce", "warn")}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": levels}},
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": name},
        },
    )
    return name


@contextmanager
def own_namespace(kubectl: Kubectl, prefix: str = "test") -> Iterator[str]:
    """Make a namespace, and delete it at the end without waiting."""
    name = make_namespace(kubectl, prefix)
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
