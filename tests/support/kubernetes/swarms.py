"""ModelSwarms over plain HTTP, for tests that try hundreds of documents: what the API server says, nothing between.

Used by tests of the CRD. `kubectl` takes a third of a second per call; this takes milliseconds.
"""

from __future__ import annotations

import base64
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.waiting import wait_for

CRD = Path(__file__).parents[3] / "crds" / "modelswarm.io_modelswarms.yaml"
_PATH = "/apis/modelswarm.io/v1alpha1/namespaces/{}/modelswarms"

Json = dict[str, Any]


def install_crd(kubectl: Kubectl) -> None:
    """As the file is, and the API server serves it."""
    kubectl("apply", "--server-side", "-f", str(CRD))
    wait_served(kubectl)


def wait_served(kubectl: Kubectl) -> None:
    """Of a resource that was made just now, objects are refused at first."""
    kubectl.wait_condition("crd", "modelswarms.modelswarm.io", "Established", 20.0)
    wait_for("modelswarms are served", lambda: "modelswarms" in _resources(kubectl), 20.0)


def _resources(kubectl: Kubectl) -> str:
    return kubectl("api-resources", "--api-group=modelswarm.io", "-o", "name")


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    body: Json
    warnings: tuple[str, ...]

    @property
    def accepted(self) -> bool:
        return self.code < 300

    @property
    def causes(self) -> tuple[str, ...]:
        """`field: sentence` of everything that is wrong; the whole message where there is no list."""
        told = self.body.get("details", {}).get("causes", ())
        listed = tuple(f"{cause.get('field', '')}: {cause['message']}" for cause in told)
        return listed or (str(self.body.get("message", "")),)


class Swarms:
    """Those of one namespace."""

    def __init__(self, http: httpx.Client, namespace: str) -> None:
        self._http, self._path = http, _PATH.format(namespace)

    def create(self, document: Json, *, dry_run: bool = False, strict: bool = True) -> Answer:
        return self._send("POST", self._path, document, dry_run=dry_run, strict=strict)

    def replace(self, document: Json) -> Answer:
        """As `kubectl replace`: whatever is stored."""
        name = document["metadata"]["name"]
        version = self.get(name)["metadata"]["resourceVersion"]
        document = document | {"metadata": {"name": name, "resourceVersion": version}}
        return self._send("PUT", f"{self._path}/{name}", document)

    def merge(self, name: str, patch: Json, *, status: bool = False) -> Answer:
        path = f"{self._path}/{name}" + ("/status" if status else "")
        return self._send("PATCH", path, patch, content="application/merge-patch+json")

    def get(self, name: str) -> Json:
        return self._send("GET", f"{self._path}/{name}", None).body

    def delete(self, name: str) -> None:
        answer = self._send("DELETE", f"{self._path}/{name}", None)
        assert answer.code in (200, 404), answer.body

    def _send(
        self,
        verb: str,
        path: str,
        document: Json | None,
        *,
        dry_run: bool = False,
        strict: bool = True,
        content: str = "application/json",
    ) -> Answer:
        query = {"fieldValidation": "Strict" if strict else "Warn"}
        if dry_run:
            query["dryRun"] = "All"
        said = self._http.request(
            verb, path, params=query, json=document, headers={"Content-Type": content}
        )
        return Answer(said.status_code, said.json(), tuple(said.headers.get_list("Warning")))


@contextmanager
def connected(kubeconfig: Path) -> Iterator[httpx.Client]:
    """As the user of the kubeconfig (client certificate)."""
    config = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    context = ssl.create_default_context(cadata=_text(cluster, "certificate-authority"))
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder) / "certificate", Path(folder) / "key"
        certificate.write_text(_text(user, "client-certificate"))
        key.write_text(_text(user, "client-key"))
        context.load_cert_chain(certificate, key)
    with httpx.Client(base_url=cluster["server"], verify=context, timeout=30.0) as client:
        yield client


def _text(part: Json, name: str) -> str:
    if f"{name}-data" in part:
        return base64.b64decode(part[f"{name}-data"]).decode()
    return Path(part[name]).read_text()


def swarm(name: str = "counting", **spec: Any) -> Json:
    return {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": name},
        "spec": {"model": {"source": "demo://counting"}, **spec},
    }


def created(answer: Answer) -> Json:
    """What is stored now."""
    assert answer.accepted, answer.causes
    return answer.body
