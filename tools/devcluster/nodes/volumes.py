"""A folder of the host for pods of the test cluster: a PersistentVolume of type hostPath, bound to a claim.

Pod Security `restricted` forbids hostPath in a pod and allows a claim. So test pods get what is too large for an image:
torch (the virtual environment's packages) and models. Used by tests; the volume is mounted read-only.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from tools.devcluster.control_plane.kubectl import Kubectl


def host_volume(kubectl: Kubectl, name: str, path: Path, namespace: str) -> str:
    """Make the volume and the claim `name`, and return the claim's name. Mount it with `readOnly: true`."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder: pods could not mount it")
    volume = f"{namespace}-{name}"
    kubectl.apply(_volume(volume, path, name, namespace), _claim(volume, name, namespace))
    return name


def torch_mounted(claim: str) -> dict[str, Any]:
    """Return a patch over server pods that mounts torch from that claim, where the image without torch looks for it."""
    mount = {"name": "torch", "mountPath": "/opt/torch", "readOnly": True}
    volume = {"name": "torch", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    containers = [{"name": "server", "volumeMounts": [mount]}]
    return {"spec": {"containers": containers, "volumes": [volume]}}


def site_packages() -> Path:
    """Return the packages of the virtual environment that runs the tests."""
    return Path(sysconfig.get_path("purelib"))


def _volume(volume: str, path: Path, claim: str, namespace: str) -> dict[str, Any]:
    spec = {
        "capacity": {"storage": "100Gi"},
        "accessModes": ["ReadOnlyMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "claimRef": {"name": claim, "namespace": namespace},
        "hostPath": {"path": str(path), "type": "Directory"},
    }
    meta = {"name": volume, "labels": {"modelswarm.io/test-namespace": namespace}}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": meta, "spec": spec}


def _claim(volume: str, claim: str, namespace: str) -> dict[str, Any]:
    spec = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": volume,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": namespace},
        "spec": spec,
    }
