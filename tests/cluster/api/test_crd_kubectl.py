"""ModelSwarms by kubectl, at a real API server: columns, scale, explain, apply, edit, patch, and the stored status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.api_client import CRD_NAME, ApiClient, SwarmApi, created, install_crd, swarm

from tools.crd.definition import build_definition
from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.control_plane.kubectl import CommandFailed, Kubectl
from tools.devcluster.waiting import wait_for

pytestmark = pytest.mark.full

Json = dict[str, Any]


@pytest.fixture(scope="module")
def level(api: ApiLevel) -> ApiLevel:
    install_crd(api)
    return api


@pytest.fixture
def swarms(level: ApiLevel, namespace: str) -> Iterator[SwarmApi]:
    with ApiClient(level) as client:
        yield SwarmApi(client, namespace)


@pytest.fixture
def kubectl(level: ApiLevel, namespace: str) -> Kubectl:
    return level.kubectl.in_namespace(namespace)


STATUS: Json = {
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "SpanUncovered",
            "message": "span 1 (blocks 4:8) has no server",
            "lastTransitionTime": "2026-11-21T12:00:00Z",
            "observedGeneration": 1,
        }
    ],
    "servedName": "counting",
    "url": "http://gateway.ms:8000/v1",
    "replicas": 0,
    "selector": "modelswarm.io/swarm=counting,modelswarm.io/span=0",
    "coverage": 0,
    "coverageText": "0/2",
    "spansText": "0:4=2/2 4:8=0/2",
    "incarnation": 7,
    "spans": [
        {"index": 0, "blocks": "0:4", "ready": 2, "desired": 2, "servers": ["a", "b"]},
        {"index": 1, "blocks": "4:8", "ready": 0, "desired": 2, "servers": []},
    ],
    "slots": [
        {
            "slot": "1-0",
            "incarnation": 6,
            "failures": 3,
            "notBefore": "2026-11-21T12:01:00Z",
            "lastFailure": "OOMKilled",
        }
    ],
    "model": {
        "source": "demo://counting",
        "revision": "abc",
        "family": "llama",
        "blocks": 8,
        "context": 4096,
        "vocab": 261,
        "hidden": 128,
        "dtype": "float32",
        "blockElements": 5_000_000_000,
        "embeddingElements": 33408,
        "kvElements": 256,
        "tied": True,
    },
    "plan": {
        "hash": "abc",
        "spans": [{"index": 0, "first": 0, "last": 4, "pages": 10}],
    },
}


def test_status_is_stored_whole_and_keeps_the_generation(
    swarms: SwarmApi,
) -> None:
    created(swarms.create(swarm()))

    stored = created(swarms.merge("counting", {"status": STATUS}, status=True))

    assert stored["status"] == STATUS
    assert stored["metadata"]["generation"] == 1
    assert swarms.merge("counting", {"status": {"replicas": 9}}).body["status"] == STATUS


COLUMNS = ["NAME", "READY", "REASON", "MODEL", "COVERAGE", "REPLICAS", "URL", "AGE"]


def test_kubectl_get_shows_the_columns(kubectl: Kubectl, swarms: SwarmApi) -> None:
    created(swarms.create(swarm(replicas=2)))
    created(swarms.merge("counting", {"status": STATUS}, status=True))

    head, row = kubectl("get", "msw").splitlines()
    wide_head, wide = kubectl("get", "ai", "-o", "wide").splitlines()

    assert head.split() == COLUMNS
    columns = "counting False SpanUncovered demo://counting 0/2 2 http://gateway.ms:8000/v1"
    assert row.split()[:7] == columns.split()
    assert wide_head.split()[8:] == ["SERVED", "SPANS"]
    assert wide.split()[8:] == ["counting", "0:4=2/2", "4:8=0/2"]


def test_kubectl_scale_sets_and_reports_replicas(kubectl: Kubectl, swarms: SwarmApi) -> None:
    created(swarms.create(swarm(replicas=2)))
    created(swarms.merge("counting", {"status": STATUS | {"replicas": 1}}, status=True))

    kubectl("scale", "msw", "counting", "--replicas=3")
    scale = json.loads(kubectl("get", "msw", "counting", "--subresource=scale", "-o", "json"))

    assert swarms.get("counting")["spec"]["replicas"] == 3
    assert scale["status"] == {"replicas": 1, "selector": STATUS["selector"]}
    with pytest.raises(CommandFailed, match="less than or equal to 1000"):
        kubectl("scale", "msw", "counting", "--replicas=1001")


def test_kubectl_explain_describes_every_field(kubectl: Kubectl) -> None:
    listed = kubectl("explain", "modelswarm.spec", "--recursive")
    assert "<Object>" in listed
    for path in (
        "spec",
        "spec.model",
        "spec.spans.ranges",
        "spec.pools.podTemplate.spec",
        "status",
    ):
        text = kubectl("explain", f"modelswarm.{path}")
        assert "<no description>" not in text and "<empty>" not in text, path
        fields = text.partition("FIELDS:")[2]
        for entry in fields.split("\n\n"):
            lines = [line.strip() for line in entry.strip().splitlines()]
            values = [line for line in lines[1:] if not line.startswith("enum:")]
            assert values or not lines, f"{path}: {entry}"


def test_apply_by_two_managers_joins_pools_by_name(kubectl: Kubectl, swarms: SwarmApi) -> None:
    kubectl("apply", "--server-side", "--field-manager=a", "-f", "-", stdin=json.dumps(swarm()))
    other = swarm(pools=[{"name": "spot"}])
    del other["spec"]["model"]
    other["spec"]["model"] = {"source": "demo://counting"}
    kubectl("apply", "--server-side", "--field-manager=b", "-f", "-", stdin=json.dumps(other))
    third = swarm(pools=[{"name": "steady"}])
    kubectl("apply", "--server-side", "--field-manager=c", "-f", "-", stdin=json.dumps(third))

    assert [pool["name"] for pool in swarms.get("counting")["spec"]["pools"]] == ["spot", "steady"]


def test_kubectl_edit_and_replace_are_validated(
    kubectl: Kubectl, swarms: SwarmApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps(swarm(replicas=2)))

    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i 's/replicas: 2/replicas: 3/' \"$1\"\n")
    editor.chmod(0o755)
    monkeypatch.setenv("KUBE_EDITOR", str(editor))
    kubectl("edit", "msw", "counting")
    assert swarms.get("counting")["spec"]["replicas"] == 3
    kubectl("replace", "-f", "-", stdin=json.dumps(swarm(replicas=4)))
    assert swarms.get("counting")["spec"]["replicas"] == 4
    for words in (("apply", "-f", "-"), ("replace", "-f", "-"), ("create", "-f", "-")):
        with pytest.raises(CommandFailed, match=r"spec\.replicas"):
            kubectl(*words, stdin=json.dumps(swarm(replicas=-1)))
        with pytest.raises(CommandFailed, match=r'unknown field "spec\.replica"'):
            kubectl(*words, stdin=json.dumps(swarm(replica=1)))


def test_kubectl_patch_by_two_writers_keeps_both(kubectl: Kubectl, swarms: SwarmApi) -> None:
    created(swarms.create(swarm()))

    kubectl("annotate", "msw", "counting", "modelswarm.io/reconcile-at=now")
    kubectl("label", "msw", "counting", "team=blue")
    kubectl("patch", "msw", "counting", "--type=json", "-p", JSON_PATCH)

    stored = swarms.get("counting")
    assert stored["metadata"]["annotations"]["modelswarm.io/reconcile-at"] == "now"
    assert stored["metadata"]["labels"] == {"team": "blue"}
    assert stored["spec"]["rollout"]["surge"] == 2


JSON_PATCH = json.dumps([{"op": "replace", "path": "/spec/rollout/surge", "value": 2}])


def test_object_older_than_a_rule_can_be_corrected(level: ApiLevel, swarms: SwarmApi) -> None:
    """After an upgrade of the CRD, status and finalizers of older objects must stay writable."""
    lax = build_definition()
    whole = lax["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    whole["properties"]["spec"]["properties"]["replicas"]["maximum"] = 5000
    whole["properties"]["spec"]["properties"]["model"]["properties"]["source"] = {"type": "string"}
    level.kubectl.apply(lax)
    old = swarm("old", replicas=3000, model={"source": "s3://bucket"})
    wait_for("the lax rules", lambda: swarms.create(old).accepted, 20.0, every=0.2)
    install_crd(level)
    bad = swarm("new", model={"source": "s3://bucket"})
    wait_for("the rules", lambda: not swarms.create(bad, dry_run=True).accepted, 20.0, every=0.2)

    assert created(swarms.merge("old", {"status": STATUS}, status=True))["status"] == STATUS
    for finalizers in (["modelswarm.io/drain"], []):
        assert swarms.merge("old", {"metadata": {"finalizers": finalizers}}).accepted
    assert swarms.merge("old", {"spec": {"paused": True}}).accepted
    assert not swarms.merge("old", {"spec": {"model": {"source": "s3://other"}}}).accepted
    assert swarms.merge("old", {"spec": {"model": {"source": "demo://counting"}}}).accepted


def test_schema_has_no_violation_condition(level: ApiLevel) -> None:
    stored = level.kubectl.get("crd", CRD_NAME)

    conditions = {each["type"]: each["status"] for each in stored["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    assert stored["spec"]["versions"] == build_definition()["spec"]["versions"]


def test_annotations_up_to_the_kubernetes_limit_are_stored(swarms: SwarmApi) -> None:
    document = swarm("a")
    document["metadata"]["annotations"] = {"x": "ü" * 131_000}
    assert swarms.create(document).accepted

    document["metadata"]["annotations"] = {"x": "ü" * 131_073}
    assert "may not be more than 262144 bytes" in swarms.create(document).causes[0]


def test_largest_document_fits_client_side_apply(kubectl: Kubectl, swarms: SwarmApi) -> None:
    """`kubectl apply` keeps a copy in an annotation of at most 256 KiB."""
    document = swarm(
        model={"source": "demo://counting", "chatTemplate": "x" * 65536},
        spans={"ranges": [{"first": i, "last": i + 1} for i in range(256)]},
    )
    document["spec"]["pools"] = [
        {"name": f"pool-{i}", "resources": {"limits": {"memory": "16Gi", "nvidia.com/gpu": 1}}}
        for i in range(32)
    ]

    kubectl("apply", "-f", "-", stdin=json.dumps(document))

    assert len(swarms.get("counting")["spec"]["spans"]["ranges"]) == 256
