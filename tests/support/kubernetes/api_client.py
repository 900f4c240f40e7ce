"""Requests of an administrator without a program in between: kubectl costs a tenth of a second per call.

Used by tests that look often or write a lot. One `Plain` per thread.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.waiting import NoAnswer

Json = dict[str, Any]
SWARMS = "/apis/modelswarm.io/v1alpha1/namespaces/{}/modelswarms"
PODS = "/api/v1/namespaces/{}/pods"
USER = "system:serviceaccount:{}:{}"  # the user that a ServiceAccount is: namespace, name
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
WATCH = httpx.Timeout(30, read=None)  # silent while nothing happens


class Unanswered(httpx.HTTPStatusError, NoAnswer):
    """The server is too busy or lacks a part of itself: 429 or 5xx."""


class Plain:
    def __init__(self, level: ApiLevel) -> None:
        pair = level.pki.client("admin", "system:masters")
        trust = ssl.create_default_context(cafile=str(level.pki.ca.certificate))
        trust.load_cert_chain(str(pair.certificate), str(pair.key))
        self._client = httpx.Client(base_url=level.url, verify=trust, timeout=30)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str, **query: str) -> Json:
        return read(self._client.get(path, params=query))

    def find(self, path: str) -> Json | None:
        answer = self._client.get(path)
        return None if answer.status_code == 404 else read(answer)

    def items(self, path: str, **query: str) -> list[Json]:
        found = self.get(path, **query)["items"]
        return list(found)

    def post(self, path: str, body: Json) -> Json:
        return read(self._client.post(path, json=body))

    def try_post(self, path: str, body: Json) -> int:
        """The code, whatever it is."""
        return self._client.post(path, json=body).status_code

    def put(self, path: str, body: Json) -> Json:
        return read(self._client.put(path, json=body))

    def patch(self, path: str, body: Json, kind: str = MERGE) -> Json:
        return read(self._client.patch(path, json=body, headers={"Content-Type": kind}))

    def delete(self, path: str, **options: Any) -> Json:
        """Gone already is fine."""
        answer = self._client.request("DELETE", path, json=options or None)
        return {} if answer.status_code == 404 else read(answer)

    def may(
        self, user: str, verb: str, resource: str, namespace: str = "", group: str = ""
    ) -> bool:
        """Whether that user may, as the API server sees it at this moment: of changed rules it learns by a watch."""
        kind, _, subresource = resource.partition("/")
        asked = {"namespace": namespace, "group": group, "resource": kind, "verb": verb}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": {**asked, "subresource": subresource}},
        }
        answer = self.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def lines(
        self, path: str, opened: Callable[[socket.socket], None], **query: str
    ) -> Iterator[str]:
        """Of a watch, until the API server ends it or somebody shuts the socket given to `opened`. From any thread.

        Closing this client under such a thread would be wrong: it would go on to read from whatever gets the same
        file descriptor next.
        """
        with self._client.stream("GET", path, params=query, timeout=WATCH) as answer:
            opened(answer.extensions["network_stream"].get_extra_info("socket"))
            if answer.is_error:
                answer.read()
                read(answer)
            yield from answer.iter_lines()


def read(answer: httpx.Response) -> Json:
    if answer.is_error:
        passing = answer.status_code == 429 or answer.is_server_error
        failed = Unanswered if passing else httpx.HTTPStatusError
        raise failed(answer.text, request=answer.request, response=answer)
    return dict(answer.json())
