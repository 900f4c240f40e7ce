"""Kubeconfig files: a user and the place of the API server, complete in one file.

Used by the parts that are clients of the API server and by tests.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from tools.devcluster.control_plane.pki import Pair


def write_kubeconfig(file: Path, server: str, ca: Path, user: Pair | str) -> Path:
    """Write the file for a client certificate or a bearer token. JSON is YAML, so every client reads it."""
    if isinstance(user, str):
        credentials = {"token": user}
    else:
        credentials = {
            "client-certificate-data": _data(user.certificate),
            "client-key-data": _data(user.key),
        }
    cluster = {"server": server, "certificate-authority-data": _data(ca)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "modelswarm-test", "cluster": cluster}],
        "users": [{"name": "user", "user": credentials}],
        "contexts": [
            {"name": "modelswarm-test", "context": {"cluster": "modelswarm-test", "user": "user"}}
        ],
        "current-context": "modelswarm-test",
    }
    file.touch(mode=0o600)
    file.write_text(json.dumps(document, indent=1))
    return file


def existing_kubeconfig() -> Path | None:
    """Return the file that leads to a foreign cluster, which a person chooses with `CLUSTER=existing`."""
    if os.environ.get("CLUSTER") != "existing":
        return None
    given = os.environ.get("KUBECONFIG")
    if not given:
        raise SystemExit("CLUSTER=existing needs KUBECONFIG: the file that leads to the cluster")
    return Path(given)


def _data(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
