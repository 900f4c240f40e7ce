"""Pod patches: what they may change, what is restored and reported, and which shapes are refused."""

from __future__ import annotations

from typing import Any

import pytest

from modelswarm.errors import UserError
from modelswarm.resources.labels import LINKS
from modelswarm_operator.reconcile.manifests.pod_template import apply_patches
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import Json

MINE = f"{names.DOMAIN}/swarm"
WHERE = "patch"
SERVER = f"spec.containers[{names.CONTAINER}]"


def make_pod() -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "a",
            "namespace": "ns",
            "labels": {MINE: "s"},
            "annotations": {"own": "1"},
        },
        "spec": {
            "hostname": "a",
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": names.CONTAINER,
                    "image": "i",
                    "args": ["x"],
                    "env": [{"name": "POD_IP", "value": "1"}, {"name": "FREE", "value": "2"}],
                    "ports": [{"name": LINKS, "containerPort": 7000}],
                }
            ],
        },
    }


def patch_server(**fields: Any) -> Json:
    return {"spec": {"containers": [{"name": names.CONTAINER, **fields}]}}


def apply(patch: Json) -> tuple[Json, list[str]]:
    pod = make_pod()
    result, ignored = apply_patches(pod, [(WHERE, patch)])
    assert pod == make_pod(), "the pod itself is not changed"
    return result, ignored


def server_of(pod: Json) -> Json:
    server: Json = pod["spec"]["containers"][0]
    return server


def test_free_fields_are_changed() -> None:
    result, ignored = apply(
        {
            "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
            "spec": {"nodeSelector": {"a": "b"}},
        }
    )
    assert ignored == []
    assert result["metadata"]["labels"] == {MINE: "s", "team": "x"}
    assert result["metadata"]["annotations"] == {"own": "1", "note": "y"}
    assert result["spec"]["nodeSelector"] == {"a": "b"}


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"metadata": {"name": "b"}}, "metadata.name"),
        ({"metadata": {"finalizers": ["f"]}}, "metadata.finalizers"),
        ({"metadata": {"labels": {MINE: "t"}}}, f"metadata.labels[{MINE}]"),
        ({"metadata": {"annotations": {"own": "2"}}}, "metadata.annotations[own]"),
        (
            {"metadata": {"labels": {"app.kubernetes.io/name": "t"}}},
            "metadata.labels[app.kubernetes.io/name]",
        ),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        ({"spec": {"hostname": None}}, "spec.hostname"),
        ({"spec": {"activeDeadlineSeconds": 5}}, "spec.activeDeadlineSeconds"),
        (patch_server(args=["y"]), f"{SERVER}.args"),
        (patch_server(command=["y"]), f"{SERVER}.command"),
        (patch_server(env=[{"name": "POD_IP", "value": "9"}]), f"{SERVER}.env[POD_IP]"),
        (patch_server(ports=[{"name": LINKS, "containerPort": 7000, "hostPort": 1}]), f"{SERVER}.ports[{LINKS}]"),
    ],
)  # fmt: skip
def test_reserved_field_is_restored_and_reported(patch: Json, field: str) -> None:
    assert apply(patch) == (make_pod(), [f"{WHERE}: {field}"])


def test_all_reserved_fields_are_reported_by_patch() -> None:
    first = patch_server(args=["y"], env=[{"name": "POD_IP", "value": "9"}])
    second = {"metadata": {"name": "b"}, "spec": {"hostname": "c"}}
    result, ignored = apply_patches(make_pod(), [("one", first), ("none", {}), ("two", second)])
    assert result == make_pod()
    assert ignored == [
        f"one: {SERVER}.args",
        f"one: {SERVER}.env[POD_IP]",
        "two: metadata.name",
        "two: spec.hostname",
    ]


def test_environment_of_the_user_stays() -> None:
    result, ignored = apply(patch_server(env=[{"name": "FREE", "value": "3"}]))
    assert ignored == []
    assert {e["name"]: e["value"] for e in server_of(result)["env"]} == {"POD_IP": "1", "FREE": "3"}


def test_port_of_the_links_is_not_shared() -> None:
    """A second entry of the same number would be another name for it."""
    result, ignored = apply(patch_server(ports=[{"name": "mine", "containerPort": 7000}]))
    assert ignored == [f"{WHERE}: {SERVER}.ports[{LINKS}]"]
    assert server_of(result)["ports"] == [{"name": LINKS, "containerPort": 7000}]


def test_server_stays_the_first_container() -> None:
    result, ignored = apply({"spec": {"containers": [{"name": "side", "image": "j"}]}})
    assert ignored == []
    assert [each["name"] for each in result["spec"]["containers"]] == [names.CONTAINER, "side"]


@pytest.mark.parametrize("containers", [None, []])
def test_removed_server_is_restored(containers: list[Json] | None) -> None:
    patch = {"spec": {"containers": containers}}
    if containers == []:
        patch = {"spec": {"containers": [{"name": names.CONTAINER, "$patch": "delete"}]}}
    assert apply(patch) == (make_pod(), [f"{WHERE}: {SERVER}"])


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"metadata": None}, "patch.metadata"),
        ({"spec": "x"}, "patch.spec"),
        ({"metadata": {"labels": "x"}}, "patch.metadata.labels"),
        ({"spec": {"containers": "x"}}, "patch.spec.containers"),
        (patch_server(env="x"), "patch.spec.containers[0].env"),
        (patch_server(ports="x"), "patch.spec.containers[0].ports"),
    ],
)
def test_wrong_shape_is_refused(patch: Json, field: str) -> None:
    with pytest.raises(UserError) as refused:
        apply(patch)
    assert refused.value.field == field
