"""The quickstart of docs/kubernetes.md, unchanged: it installs, chats, is tested by helm, and leaves nothing.

The fixture `release` has run the installation. The last test removes it, so this file comes after all others that use
the release: pytest runs the files of a folder by name.
"""

from __future__ import annotations

import json
from functools import partial

import httpx
import pytest
from support.kubernetes.quickstart import Quickstart
from support.kubernetes.release import Release

pytestmark = pytest.mark.timeout(600)


def test_quickstart_chats_through_the_service(quickstart: Quickstart, release: Release) -> None:
    release.wait_whole()
    shown = quickstart.run("ask")
    content = json.loads(shown[shown.index("{") :])["choices"][0]["message"]["content"]
    assert "7 8 9 10 11 12" in content.replace(",", "")
    assert "counting" in release.kubectl("get", "modelswarms")


def test_service_answers_an_openai_stream(release: Release) -> None:
    release.wait_whole()
    body = {
        "model": "counting",
        "messages": [{"role": "user", "content": "Count from 1 to 20."}],
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{release.url}/v1/chat/completions", json=body, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 10


def test_helm_test_gets_a_completion(release: Release) -> None:
    release.wait_whole()
    shown = release.kubectl.helm("test", "modelswarm", "--logs")
    assert "Succeeded" in shown
    assert "counting: one two three" in shown


def test_rest_of_the_quickstart_leaves_nothing(quickstart: Quickstart, release: Release) -> None:
    release.wait_whole()
    assert "counting" in quickstart.run("kill")
    release.wait_whole()
    assert "Succeeded" in quickstart.run("scale")
    release.wait_whole(2)
    quickstart.run("away")
    for kind in ("modelswarms", "pods", "services", "poddisruptionbudgets", "deployments"):
        release.wait(f"no {kind}", partial(nothing_is_left, release, kind), 120)


def nothing_is_left(release: Release, kind: str) -> bool:
    """Say whether no object is left but the pod of `helm test`, which helm keeps for its logs."""
    found = {each["metadata"]["name"] for each in release.kubectl.items(kind)}
    return found <= {"modelswarm-test-completion"}
