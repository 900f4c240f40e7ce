"""Kubeconfig files: who one is and where the API server is, complete in one file.

Used by the parts that are clients of the API server and by tests.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tools.devcluster.control_plane.pki import Pair


def write_kubeconfig(file: Path, server: str, ca: Path, user: Pair | str) -> Path:
    """`user`: a client certificate or a bearer token. JSON is YAML, so every client reads it."""
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


def _data(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
