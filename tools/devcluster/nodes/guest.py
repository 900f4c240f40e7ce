"""What a person needs beside the KUBECONFIG to install the project's chart on a cluster of ours: kubectl and helm of
its version, and the chart's values for images that hold no torch.

Called once by `RealCluster` and by tests that follow the documented quickstart. Torch is the virtual environment's own,
on a volume that the chart makes and every server pod mounts read-only.
"""

from __future__ import annotations

import json
from pathlib import Path

from tools.devcluster.build.build import program
from tools.devcluster.layout import Layout
from tools.devcluster.nodes.volumes import site_packages, torch_mounted

TOOLS = ("kubectl", "helm")
_VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {{{{ .Release.Namespace }}}}-torch
spec:
  capacity: {{storage: 100Gi}}
  accessModes: [ReadOnlyMany]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  claimRef: {{name: torch, namespace: {{{{ .Release.Namespace }}}}}}
  hostPath: {{path: {path}, type: Directory}}
"""
_CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: torch
  namespace: {{ .Release.Namespace }}
spec:
  accessModes: [ReadOnlyMany]
  storageClassName: ""
  volumeName: {{ .Release.Namespace }}-torch
  resources: {requests: {storage: 1Gi}}
"""


def write_tools(layout: Layout) -> Path:
    """A folder for the PATH."""
    folder = layout.root / "bin"
    folder.mkdir(exist_ok=True)
    for tool in TOOLS:
        link = folder / tool
        link.unlink(missing_ok=True)
        link.symlink_to(program(tool))
    return folder


def write_values(layout: Layout) -> Path:
    """For `helm install --values`. JSON is YAML too."""
    values = {
        "server": {"image": {"repository": "modelswarm/server-slim"}},
        "serverPodTemplate": torch_mounted("torch"),
        "extraObjects": [_VOLUME.format(path=json.dumps(str(site_packages()))), _CLAIM],
    }
    file = layout.root / "values.yaml"
    file.write_text(json.dumps(values, indent=1) + "\n")
    return file
