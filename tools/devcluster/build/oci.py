"""An image of one file as an OCI archive, written without a builder: enough for the pause image.

Used by `images`. Knows nothing of the archive's readers.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def write_program_image(program: Path, name: str, archive: Path) -> None:
    """Write an image with one static program, which it runs as user 65535."""
    layer = _tar({program.name: program.read_bytes()}, mode=0o755)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = {_digest(layer): layer}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _add(blobs, json.dumps(config).encode(), CONFIG),
        "layers": [_described(layer, LAYER)],
    }
    described = _add(blobs, json.dumps(manifest).encode(), MANIFEST)
    described["annotations"] = {"io.containerd.image.name": name}
    index = {"schemaVersion": 2, "manifests": [described]}
    files = {f"blobs/{digest.replace(':', '/')}": blob for digest, blob in blobs.items()}
    files["index.json"] = json.dumps(index).encode()
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    archive.write_bytes(_tar(files, mode=0o644))


def _add(blobs: dict[str, bytes], blob: bytes, kind: str) -> dict[str, Any]:
    blobs[_digest(blob)] = blob
    return _described(blob, kind)


def _described(blob: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = mode
            tar.addfile(entry, io.BytesIO(data))
    return held.getvalue()
