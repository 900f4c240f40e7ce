"""Requests to an API server as its administrator, over plain HTTP: kubectl takes a tenth of a second per call.

`ApiClient` for objects of any kind, `SwarmApi` for ModelSwarms and the refusals of their rules. Used by tests that read
often, write a lot or try hundreds of documents. One client per thread.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.waiting import NoResponse, wait_for

Json = dict[str, Any]
CRD = Path(__file__).parents[3] / "crds" / "modelswarm.io_modelswarms.yaml"
CRD_NAME = "modelswarms.modelswarm.io"
SWARMS = "/apis/modelswarm.io/v1alpha1/namespaces/{}/modelswarms"
PODS = "/api/v1/namespaces/{}/pods"
USER = "system:serviceaccount:{}:{}"  # user name of a ServiceAccount: namespace, name
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
WATCH = httpx.Timeout(30, read=None)  # silent while nothing happens


class Unanswered(httpx.HTTPStatusError, NoResponse):
    """The server is too busy, or a part of it does not run: 429 or 5xx."""


class ApiClient:
    def __init__(self, level: ApiLevel) -> None:
        pair = level.pki.client("admin", "system:masters")
        trust = ssl.create_default_context(cafile=str(level.pki.ca.certificate))
        trust.load_cert_chain(str(pair.certificate), str(pair.key))
        self._client = httpx.Client(base_url=level.url, verify=trust, timeout=30)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str, **query: str) -> Json:
        return checked_json(self._client.get(path, params=query))

    def find(self, path: str) -> Json | None:
        answer = self._client.get(path)
        return None if answer.status_code == 404 else checked_json(answer)

    def items(self, path: str, **query: str) -> list[Json]:
        found = self.get(path, **query)["items"]
        return list(found)

    def post(self, path: str, body: Json) -> Json:
        return checked_json(self._client.post(path, json=body))

    def post_code(self, path: str, body: Json) -> int:
        """Return the code of the response, also of an error."""
        return self._client.post(path, json=body).status_code

    def put(self, path: str, body: Json) -> Json:
        return checked_json(self._client.put(path, json=body))

    def patch(self, path: str, body: Json, kind: str = MERGE) -> Json:
        return checked_json(self._client.patch(path, json=body, headers={"Content-Type": kind}))

    def delete(self, path: str, **options: Any) -> Json:
        """Delete an object or a collection. One that does not exist is no error."""
        answer = self._client.request("DELETE", path, json=options or None)
        return {} if answer.status_code == 404 else checked_json(answer)

    def is_allowed(
        self, user: str, verb: str, resource: str, namespace: str = "", group: str = ""
    ) -> bool:
        """Say whether the API server allows it now. It learns of changed rules by a watch."""
        kind, _, subresource = resource.partition("/")
        asked = {"namespace": namespace, "group": group, "resource": kind, "verb": verb}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": {**asked, "subresource": subresource}},
        }
        answer = self.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def request(
        self, verb: str, path: str, body: Json | None, content: str, **query: str
    ) -> Answer:
        """Return the response, also of an error."""
        headers = {"Content-Type": content}
        answer = self._client.request(verb, path, params=query, json=body, headers=headers)
        return Answer(answer.status_code, answer.json(), tuple(answer.headers.get_list("Warning")))

    def watch_lines(
        self, path: str, opened: Callable[[socket.socket], None], **query: str
    ) -> Iterator[str]:
        """Yield the lines of a watch until the API server ends it, or a thread shuts the socket given to `opened`.

        Closing the client from that thread would be wrong: the reader would read from the next user of the same file
        descriptor.
        """
        with self._client.stream("GET", path, params=query, timeout=WATCH) as answer:
            opened(answer.extensions["network_stream"].get_extra_info("socket"))
            if answer.is_error:
                answer.read()
                checked_json(answer)
            yield from answer.iter_lines()


def checked_json(answer: httpx.Response) -> Json:
    if answer.is_error:
        passing = answer.status_code == 429 or answer.is_server_error
        failed = Unanswered if passing else httpx.HTTPStatusError
        raise failed(answer.text, request=answer.request, response=answer)
    return dict(answer.json())


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
        """`field: sentence` of every error; the whole message if it has no list."""
        causes = self.body.get("details", {}).get("causes", ())
        listed = tuple(f"{cause.get('field', '')}: {cause['message']}" for cause in causes)
        return listed or (str(self.body.get("message", "")),)


class SwarmApi:
    """Requests for the ModelSwarms of one namespace. Returns every response, also refusals."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client, self._path = client, SWARMS.format(namespace)

    def create(self, document: Json, *, dry_run: bool = False, strict: bool = True) -> Answer:
        return self._send("POST", self._path, document, dry_run=dry_run, strict=strict)

    def replace(self, document: Json) -> Answer:
        """Replace the stored object, as `kubectl replace` does."""
        name = document["metadata"]["name"]
        version = self.get(name)["metadata"]["resourceVersion"]
        document = document | {"metadata": {"name": name, "resourceVersion": version}}
        return self._send("PUT", f"{self._path}/{name}", document)

    def merge(self, name: str, patch: Json, *, status: bool = False) -> Answer:
        path = f"{self._path}/{name}" + ("/status" if status else "")
        return self._send("PATCH", path, patch, content=MERGE)

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
        return self._client.request(verb, path, document, content, **query)


def install_crd(level: ApiLevel) -> None:
    """Apply the CRD file unchanged, and wait until the API server serves it."""
    level.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    wait_crd_served(level)


def wait_crd_served(level: ApiLevel) -> None:
    """Wait until a new resource is served. The API server first refuses its objects."""
    # Not by `kubectl wait`, which fails on a new resource without conditions.
    level.kubectl.wait_condition("crd", CRD_NAME, "Established", 180)
    with ApiClient(level) as client:
        every = "/apis/modelswarm.io/v1alpha1/modelswarms"
        wait_for("modelswarms are served", lambda: client.find(every), 180, every=0.05)


def delete_crd(level: ApiLevel) -> None:
    """Delete the CRD, if there is one, after its objects have been read once.

    The cleanup of a CRD whose storage was never read fails with "storage is (re)initializing". Each failure doubles
    the API server's delay, up to minutes (kubernetes/kubernetes, crd_finalizer.go).
    """
    if level.kubectl.find("crd", CRD_NAME) is not None:
        wait_crd_served(level)
        level.kubectl("delete", "crd", CRD_NAME)


def swarm(name: str = "counting", **spec: Any) -> Json:
    return {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": name},
        "spec": {"model": {"source": "demo://counting"}, **spec},
    }


def created(answer: Answer) -> Json:
    """Return the stored object of an accepted request."""
    assert answer.accepted, answer.causes
    return answer.body
