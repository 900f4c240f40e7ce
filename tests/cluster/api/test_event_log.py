"""The watches of tests: events arrive, and a closed watch leaves no thread and no connection."""

from __future__ import annotations

import threading

import pytest
from support.kubernetes.api_client import ApiClient, Json
from support.kubernetes.event_log import Watch

from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.waiting import wait_for

pytestmark = pytest.mark.full

CONFIGS = "/api/v1/namespaces/{}/configmaps"


def test_closed_watch_has_released_its_connection(api: ApiLevel, namespace: str) -> None:
    """An open connection's thread would read from the next pipe or socket of the test."""
    seen: list[str] = []

    def note(when: float, kind: str, found: Json) -> None:
        seen.append(found["metadata"]["name"])

    before = set(threading.enumerate())
    with ApiClient(api) as client:
        path = CONFIGS.format(namespace)
        watch = Watch(client, path, "", note)
        client.post(path, {"metadata": {"name": "one"}})
        wait_for("the event", lambda: "one" in seen, 30, every=0.05)
        watch.close()
        client.post(path, {"metadata": {"name": "two"}})
    assert set(threading.enumerate()) <= before
    assert "two" not in seen
