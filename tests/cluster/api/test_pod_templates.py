"""Pod templates at a real API server: a misspelt field becomes a condition before any good server is replaced."""

from __future__ import annotations

from typing import Any

import pytest
from support.kubernetes.operator_scene import Scene, swarm

pytestmark = pytest.mark.full


def pools(template: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "a", "podTemplate": template}]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ({"spec": {"nodeSelctor": {"gpu": "a100"}}}, 'unknown field "spec.nodeSelctor"'),
        (
            {"spec": {"containers": [{"name": "server", "volumeMount": []}]}},
            'unknown field "spec.containers[0].volumeMount"',
        ),
        ({"spec": {"hostNetwork": True}}, "violates PodSecurity"),
        ({"metadata": {"labels": {"team": "ü"}}}, "metadata.labels"),
        ({"spec": {"tolerations": [{"operator": "Sometimes"}]}}, "spec.tolerations"),
    ],
)
def test_invalid_template_is_a_condition_and_servers_stay(
    stage: Scene, template: dict[str, Any], sentence: str
) -> None:
    stage.apply(swarm())
    stage.settle()
    before = {pod["metadata"]["uid"] for pod in stage.live_pods()}

    stage.apply(swarm(pools=pools(template)))
    stage.wait("the sentence", lambda: sentence in str(stage.condition("Degraded")))
    assert stage.condition("Degraded")["reason"] == "CreateRefused"
    assert {pod["metadata"]["uid"] for pod in stage.live_pods()} == before
    assert stage.condition("Ready")["status"] == "True"

    stage.apply(swarm(pools=pools({"spec": {"priorityClassName": None}})))
    stage.wait("an end of it", lambda: stage.condition("Degraded")["status"] == "False")
