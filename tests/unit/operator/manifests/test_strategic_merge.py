"""Strategic merge patch over a pod, case by case as Kubernetes' documentation describes it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typing_extensions import override

from modelswarm.errors import UserError
from modelswarm_operator.reconcile.manifests.strategic_merge import merge_pod

POD: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}, "annotations": {"n": "1"}},
    "spec": {
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "tolerations": [{"key": "old", "operator": "Exists"}],
        "containers": [
            {
                "name": "server",
                "image": "i:1",
                "args": ["--one"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "ports": [{"name": "links", "containerPort": 7000}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
            }
        ],
    },
}


def merge_spec(spec: dict[str, Any]) -> Any:
    return merge_pod(POD, {"spec": spec}, "patch")["spec"]


def merge_container(changes: dict[str, Any]) -> Any:
    return merge_spec({"containers": [{"name": "server", **changes}]})["containers"][0]


def test_maps_are_merged_and_null_deletes() -> None:
    merged = merge_pod(POD, {"metadata": {"labels": {"b": "2", "a": None}}}, "patch")
    assert merged["metadata"] == {"labels": {"b": "2"}, "annotations": {"n": "1"}}


def test_merge_leaves_the_input_pod_unchanged() -> None:
    merge_container({"env": [{"name": "A", "value": "9"}]})
    assert POD["spec"]["containers"][0]["env"][0]["value"] == "1"


@pytest.mark.parametrize(
    ("field", "item", "expected"),
    [
        ("env", {"name": "A", "value": "9"}, [{"name": "A", "value": "9"}, {"name": "B", "value": "2"}]),
        ("env", {"name": "B", "$patch": "delete"}, [{"name": "A", "value": "1"}]),
        ("ports", {"containerPort": 7000, "name": "x"}, [{"name": "x", "containerPort": 7000}]),
        ("volumeMounts", {"mountPath": "/data", "name": "d"},
         [{"name": "tmp", "mountPath": "/tmp"}, {"mountPath": "/data", "name": "d"}]),
    ],
)  # fmt: skip
def test_container_lists_are_merged_by_key(
    field: str, item: dict[str, Any], expected: list[Any]
) -> None:
    assert merge_container({field: [item]})[field] == expected


def test_plain_and_atomic_lists_are_replaced() -> None:
    assert merge_container({"args": ["--two"]})["args"] == ["--two"]
    new = [{"key": "gpu", "operator": "Exists"}]
    assert merge_spec({"tolerations": new})["tolerations"] == new


def test_container_can_be_added_and_deleted() -> None:
    added = merge_spec({"containers": [{"name": "side", "image": "s"}]})["containers"]
    assert [each["name"] for each in added] == ["server", "side"]
    gone = merge_spec({"containers": [{"name": "server", "$patch": "delete"}]})["containers"]
    assert gone == []


def test_replace_directive_replaces_a_list_or_map() -> None:
    replaced = merge_container({"env": [{"$patch": "replace"}, {"name": "C", "value": "3"}]})
    assert replaced["env"] == [{"name": "C", "value": "3"}]
    limits = merge_container({"resources": {"limits": {"$patch": "replace", "cpu": "2"}}})
    assert limits["resources"]["limits"] == {"cpu": "2"}


def test_delete_directive_empties_a_map() -> None:
    assert merge_container({"resources": {"$patch": "delete"}})["resources"] == {}


def test_retain_keys_removes_all_other_keys() -> None:
    volume = {"name": "tmp", "hostPath": {"path": "/x"}, "$retainKeys": ["name", "hostPath"]}
    assert merge_spec({"volumes": [volume]})["volumes"] == [
        {"name": "tmp", "hostPath": {"path": "/x"}}
    ]


def test_primitive_list_values_can_be_deleted() -> None:
    pod = {"metadata": {"finalizers": ["a", "b"]}}
    merged = merge_pod(
        pod, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "finalizers": ["c"]}}, "p"
    )
    assert merged["metadata"]["finalizers"] == ["b", "c"]


def test_directives_never_reach_the_pod() -> None:
    patch = {
        "affinity": {
            "$patch": "replace",
            "nodeAffinity": {"x": None, "y": [{"$patch": "merge", "z": 1}]},
        }
    }
    assert merge_spec(patch)["affinity"] == {"nodeAffinity": {"y": [{"z": 1}]}}


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ({"containers": {"name": "x"}}, "patch.spec.containers: must be a list"),
        (
            {"containers": [{"name": "server", "resources": ["x"]}]},
            "patch.spec.containers[0].resources: must be an object",
        ),
        ({"tolerations": {"key": "x"}}, "patch.spec.tolerations: must be a list"),
        ({"containers": [{"image": "x"}]}, "patch.spec.containers[0]: needs a name"),
        ({"containers": ["x"]}, "patch.spec.containers[0]: needs a name"),
        (
            {"containers": [{"name": "server", "env": "x"}]},
            "patch.spec.containers[0].env: must be a list",
        ),
        ({"$patch": "remove"}, "patch.spec: $patch: 'remove' is not allowed"),
        (
            {"volumes": [{"name": "tmp", "$retainKeys": "name"}]},
            "$retainKeys must be a list of names",
        ),
        ({"$deleteFromPrimitiveList/x": 1}, "must be a list of strings or numbers"),
        ({"$deleteFromPrimitiveList/x": [{}]}, "must be a list of strings or numbers"),
    ],
)
def test_invalid_patch_is_refused_with_its_field(patch: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        merge_spec(patch)


class CountedName(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    comparisons = 0

    @override
    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_names_of_a_long_list_are_not_compared_with_each_other() -> None:
    """A document has room for 100,000: minutes of the operator's time in each turn of the swarm."""
    names = [CountedName(f"v{number}") for number in range(300)]
    patch = {"spec": {"volumes": [{"name": name, "emptyDir": {}} for name in names]}}
    once = merge_pod({"spec": {"volumes": []}}, patch, "it")
    assert merge_pod(once, patch, "it") == once
    CountedName.comparisons = 0
    merge_pod(once, patch, "it")
    assert CountedName.comparisons < 10 * len(names)
    deleted = [{"name": name, "$patch": "delete"} for name in names[1:]]
    rest = merge_pod(once, {"spec": {"volumes": deleted}}, "it")
    assert rest == {"spec": {"volumes": [{"name": "v0", "emptyDir": {}}]}}


def test_values_of_long_lists_are_not_compared_with_each_other() -> None:
    names = [CountedName(f"v{number}") for number in range(300)]
    CountedName.comparisons = 0
    patch = {"x": names, "$deleteFromPrimitiveList/x": [*names[2:], CountedName("v0")]}
    assert merge_spec(patch)["x"] == ["v1"]
    keys: dict[str, Any] = dict.fromkeys(names, 1)
    volumes = [{"name": "a", **keys}, {"name": "a", "$retainKeys": ["name", *names[1:]]}]
    del keys[names[0]]
    assert merge_spec({"volumes": volumes})["volumes"][-1] == {"name": "a", **keys}
    assert CountedName.comparisons < 10 * len(names)
