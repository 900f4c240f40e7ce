"""Files for a person who installs the project's chart: kubectl and helm of the cluster's version, and chart values.

Called once by `RealCluster` and by tests that follow the documented quickstart. The values are for images without
torch: every server pod mounts the virtual environment's own, read-only, from a volume that the chart makes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tools.devcluster.build.build import program_path
from tools.devcluster.build.torch_packages import torch_packages
from tools.devcluster.layout import Layout
from tools.devcluster.nodes.volumes import torch_mounted

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


def write_tools(layout: Layout, tools: Sequence[str] = TOOLS) -> Path:
    """Make a folder for the PATH, and return it."""
    folder = layout.root / "bin"
    folder.mkdir(exist_ok=True)
    for tool in tools:
        link = folder / tool
        link.unlink(missing_ok=True)
        link.symlink_to(program_path(tool))
    return folder


def write_values(layout: Layout) -> Path:
    """Write the file for `helm install --values`. JSON is YAML too."""
    values = {
        "server": {"image": {"repository": "modelswarm/server-slim"}},
        "serverPodTemplate": torch_mounted("torch"),
        "extraObjects": [_VOLUME.format(path=json.dumps(str(torch_packages()))), _CLAIM],
    }
    file = layout.root / "values.yaml"
    file.write_text(json.dumps(values, indent=1) + "\n")
    return file
