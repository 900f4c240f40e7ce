"""The project's chart, rendered into objects, or refused with helm's message.

Used by tests of the chart, which need no cluster. Knows no expectations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tools.devcluster.control_plane.kubectl import CommandFailed, Kubectl

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "modelswarm"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
NAMESPACE = "swarms"
NO_CLUSTER = Kubectl(Path("/dev/null"), NAMESPACE)
KUBERNETES = "1.36.0"


def render(values: Path | None = None, *flags: str) -> list[Object]:
    """Return the objects that `helm install modelswarm` would send, with hooks."""
    chosen = () if values is None else ("-f", str(values))
    text = NO_CLUSTER.helm(
        "template", "modelswarm", str(CHART), "--kube-version", KUBERNETES, *chosen, *flags
    )
    return [found for found in yaml.safe_load_all(text) if found]


def refusal(*flags: str) -> str:
    """Return helm's message about values that the chart refuses."""
    try:
        render(None, *flags)
    except CommandFailed as failed:
        return failed.stderr
    raise AssertionError(f"helm took {' '.join(flags)}")


def find_object(objects: list[Object], kind: str, name: str) -> Object:
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {len(found)} of {[_label(o) for o in objects]}"
    return found[0]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [o for o in objects if o["kind"] in kinds]


def pods(objects: list[Object]) -> list[Object]:
    """Return every pod of these objects, with those of Deployments."""
    made = []
    for found in objects:
        if found["kind"] == "Pod":
            made.append(found)
        elif found["kind"] == "Deployment":
            template = found["spec"]["template"]
            name = found["metadata"]["name"]
            meta = {**template["metadata"], "name": name}
            made.append(
                {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
            )
    return made


def arguments(objects: list[Object], component: str) -> list[str]:
    """Return the flags of operator or gateway, with pod name and address filled in as the kubelet does."""
    deployment = find_object(objects, "Deployment", f"modelswarm-{component}")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return [
        str(word)
        .replace("$(POD_NAME)", "modelswarm-gateway-7d9-x2x")
        .replace("$(POD_IP)", "10.0.0.3")
        for word in container["args"]
    ]


def _label(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"
