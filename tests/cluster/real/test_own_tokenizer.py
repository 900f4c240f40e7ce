"""A swarm with its own tokenizer and chat template, and its model on a volume, beside the release's swarm.

Real pods inspect the model and serve it. Template and tokenizer change while it runs. Unusable ones become a
condition, and the good servers stay.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.kubernetes.api_client import swarm
from support.kubernetes.quickstart import NAMESPACE
from support.kubernetes.release import Release

import modelswarm.demo as demo
from tools.devcluster.nodes.volumes import host_volume
from tools.devcluster.waiting import wait_for

DEMO = Path(demo.__file__).parent / "counting"
CHANGE_SECONDS = 240.0
NAME = "voiced"
ONCE, TWICE = "{{ messages[0]['content'] }}", "{{ messages[0]['content'] * 2 }}"


@pytest.fixture
def models() -> Iterator[Path]:
    """Make folders that every user can read: `bare` has no tokenizer, `words` nothing else."""
    with tempfile.TemporaryDirectory(prefix="modelswarm-models-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(DEMO, folder / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
        (folder / "words").mkdir()
        for file in DEMO.glob("tokenizer*"):
            shutil.copy(file, folder / "words")
        yield folder


@pytest.fixture
def tidy(release: Release) -> Iterator[None]:
    """Remove this file's swarm and volume from the shared release."""
    release.wait_whole()
    yield
    release.kubectl("delete", "msw", NAME, "--ignore-not-found", "--timeout=90s")
    release.wait("no server of it", lambda: not release.pods(NAME), 120)
    release.kubectl("delete", "pvc", "models", "--wait=false", "--ignore-not-found")
    release.kubectl("delete", "pv", f"{NAMESPACE}-models", "--wait=false", "--ignore-not-found")


@pytest.mark.full
@pytest.mark.timeout(1500)  # seconds: starts two nodes and builds images
@pytest.mark.usefixtures("tidy")
def test_swarm_uses_the_tokenizer_it_brings(release: Release, models: Path) -> None:
    claim = host_volume(release.kubectl, "models", models, NAMESPACE)
    bare, words = f"pvc://{claim}/bare", f"pvc://{claim}/words"
    document = swarm(NAME, spans={"count": 2}, model={"source": bare})
    release.kubectl.apply(document)
    refused = degraded(release, "ModelRefused")
    assert refused == (
        f"The model can't be served: {bare}: /mnt/modelswarm/{claim}/bare has no tokenizer.json; "
        "a fast tokenizer is needed. It is inspected again later."
    )

    document["spec"]["model"] |= {"tokenizer": words, "chatTemplate": ONCE}
    release.kubectl.apply(document)
    release.kubectl.wait_condition("msw", NAME, "Ready", CHANGE_SECONDS)
    known = release.kubectl.get("msw", NAME)["status"]["model"]
    assert (known["source"], known["tokenizer"], known["blocks"]) == (bare, words, 8)
    wait_for("every gateway to answer", lambda: release.serves(NAME), CHANGE_SECONDS)
    once = asked(release)

    document["spec"]["model"]["chatTemplate"] = TWICE
    release.kubectl.apply(document)
    wait_for("the other template", lambda: asked(release) == 2 * once, CHANGE_SECONDS, every=1)
    settled(release)

    before = {pod["metadata"]["name"] for pod in release.pods(NAME)}
    document["spec"]["model"]["chatTemplate"] = "{% if %}"
    release.kubectl.apply(document)
    assert "the chat template does not compile: line 1" in degraded(release, "WeightsFailed")
    document["spec"]["model"] |= {"chatTemplate": TWICE, "source": f"pvc://{claim}/none"}
    release.kubectl.apply(document)
    assert "none is not a folder" in degraded(release, "ModelRefused")
    assert before <= {pod["metadata"]["name"] for pod in release.pods(NAME)}
    assert asked(release) == 2 * once


def asked(release: Release) -> int:
    """Return the prompt length of a message in tokens. A refusal that says when to retry is obeyed, as by clients."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "1 2 3"}], "max_tokens": 1}
    end = time.monotonic() + CHANGE_SECONDS
    while True:
        answer = httpx.post(f"{release.url}/v1/chat/completions", json=body, timeout=60)
        pause = answer.headers.get("Retry-After")
        if pause is None or time.monotonic() > end:
            break
        time.sleep(float(pause))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


def condition(release: Release, kind: str) -> dict[str, Any]:
    stored = release.kubectl.get("msw", NAME)
    conditions = stored.get("status", {}).get("conditions", ())
    current = stored["metadata"]["generation"]
    return next(
        (
            each
            for each in conditions
            if each["type"] == kind and each["observedGeneration"] == current
        ),
        {},
    )


def degraded(release: Release, reason: str) -> str:
    """Wait for the reason, and return its message."""
    reported = wait_for(
        reason,
        lambda: (found := condition(release, "Degraded")).get("reason") == reason and found,
        CHANGE_SECONDS,
        every=0.5,
        explain=lambda: explained(release),
    )
    assert reported
    return str(reported["message"])


def explained(release: Release) -> str:
    words = ("logs", "-l", "app.kubernetes.io/component=operator", "--prefix", "--tail=40")
    stored = json.dumps(release.kubectl.get("msw", NAME), indent=1)
    return f"{stored}\n{release.kubectl('get', 'pods')}\n{release.kubectl(*words)}"


def settled(release: Release) -> None:
    wait_for(
        "an end of changes",
        lambda: condition(release, "Progressing").get("reason") == "Settled",
        CHANGE_SECONDS,
        every=0.5,
    )
