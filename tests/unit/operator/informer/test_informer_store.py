"""The informer cache: resource versions decide, lists confirm, and deleted objects do not return."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from modelswarm.kube.client import MAX_LEVELS, cut_levels
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.kube.resources import NODE, POD, SERVICE, SWARM

Json = dict[str, Any]


def make_swarm(uid: str, version: int, name: str = "counting", **more: Any) -> Json:
    meta = {
        "uid": uid,
        "name": name,
        "namespace": "here",
        "resourceVersion": str(version),
        "creationTimestamp": more.pop("created", "2026-11-21T10:00:00Z"),
    }
    spec = {"model": {"source": "demo://counting", **more.pop("model", {})}}
    if "pools" in more:
        spec["pools"] = more.pop("pools")
    return {"metadata": {**meta, **more}, "spec": spec}


def make_pod(
    uid: str, version: int, owner: str = "s1", phase: str = "Running", namespace: str = "here"
) -> Json:
    meta = {
        "uid": uid,
        "name": f"pod-{uid}",
        "namespace": namespace,
        "resourceVersion": str(version),
        "ownerReferences": [{"uid": owner, "controller": True}] if owner else [],
    }
    return {"metadata": meta, "status": {"phase": phase}}


@pytest.fixture
def cache() -> Cache:
    made = Cache()
    made.replace(SWARM, [make_swarm("s1", 1)], 1)
    return made


def list_pod_uids(cache: Cache) -> set[str]:
    found = cache.observed("s1")
    assert found is not None
    return {pod.uid for pod in found.pods}


def test_pod_event_wakes_its_swarm(cache: Cache) -> None:
    assert cache.apply_event(POD, False, make_pod("a", 2)) == {"s1"}
    assert list_pod_uids(cache) == {"a"}


def test_repeated_event_wakes_no_swarm(cache: Cache) -> None:
    cache.apply_event(POD, False, make_pod("a", 2))
    assert cache.apply_event(POD, False, make_pod("a", 2)) == set()
    assert (
        cache.apply_event(POD, False, make_pod("a", 3)) == set()
    )  # a newer version with the same view


def test_older_version_is_ignored(cache: Cache) -> None:
    cache.apply_event(POD, False, make_pod("a", 5, phase="Failed"))
    assert cache.apply_event(POD, False, make_pod("a", 4)) == set()
    found = cache.observed("s1")
    assert found is not None
    assert found.pods[0].phase == "Failed"


def test_list_adds_missed_pods_and_removes_deleted_ones(cache: Cache) -> None:
    cache.apply_event(POD, False, make_pod("ghost", 2))
    assert cache.replace(POD, [make_pod("missed", 3)], 4) == {"s1"}
    assert list_pod_uids(cache) == {"missed"}


def test_pod_newer_than_the_list_stays(cache: Cache) -> None:
    cache.apply_event(POD, False, make_pod("new", 9))
    cache.replace(POD, [], 5)
    assert list_pod_uids(cache) == {"new"}


def test_list_older_than_a_deletion_restores_nothing(cache: Cache) -> None:
    cache.apply_event(POD, False, make_pod("a", 2))
    cache.apply_event(POD, True, make_pod("a", 6))
    cache.replace(POD, [make_pod("a", 2)], 5)
    assert list_pod_uids(cache) == set()
    cache.apply_event(POD, False, make_pod("a", 4))
    assert list_pod_uids(cache) == set()


def test_relabelled_pod_is_known_again(cache: Cache) -> None:
    """A watch with a selector reports a lost label as a deletion."""
    cache.apply_event(POD, False, make_pod("a", 2))
    cache.apply_event(POD, True, make_pod("a", 3))
    cache.apply_event(POD, False, make_pod("a", 4))
    assert list_pod_uids(cache) == {"a"}


def test_pod_without_owner_reference_is_ignored(cache: Cache) -> None:
    cache.apply_event(POD, False, make_pod("a", 2))
    assert cache.apply_event(POD, False, make_pod("a", 3, owner="")) == {"s1"}
    assert list_pod_uids(cache) == set()
    assert cache.apply_event(POD, False, make_pod("b", 4, owner="")) == set()


def test_pod_of_another_namespace_is_ignored(cache: Cache) -> None:
    cache.apply_event(POD, False, make_pod("forged", 2, namespace="elsewhere"))
    cache.apply_event(POD, False, make_pod("own", 3))
    assert list_pod_uids(cache) == {"own"}


def test_child_of_another_namespace_is_ignored(cache: Cache) -> None:
    child = make_pod("forged", 2, namespace="elsewhere")
    cache.apply_event(SERVICE, False, child)
    found = cache.observed("s1")
    assert found is not None and found.children == {}
    cache.apply_event(SERVICE, False, make_pod("own", 3))
    assert cache.has_child(SERVICE, found.swarm, "pod-own")
    assert not cache.has_child(SERVICE, found.swarm, "pod-forged")


def test_pod_with_a_new_owner_leaves_its_old_swarm(cache: Cache) -> None:
    cache.apply_event(POD, False, make_pod("a", 2))
    cache.apply_event(POD, False, make_pod("a", 3, owner="s2"))
    assert list_pod_uids(cache) == set()


def test_list_with_lower_versions_replaces_the_cache(cache: Cache) -> None:
    """A restored etcd has lower versions, and its list still wins."""
    cache.replace(POD, [make_pod("a", 90, phase="Failed"), make_pod("b", 91)], 100)
    cache.replace(POD, [make_pod("a", 40)], 50)
    found = cache.observed("s1")
    assert found is not None
    assert [(pod.uid, pod.phase) for pod in found.pods] == [("a", "Running")]


def test_list_of_one_swarm_keeps_the_pods_of_others(cache: Cache) -> None:
    cache.apply_event(SWARM, False, make_swarm("s2", 2, "other"))
    cache.apply_event(POD, False, make_pod("mine", 3))
    cache.apply_event(POD, False, make_pod("theirs", 4, owner="s2"))
    cache.replace(POD, [], 9, owner="s1")
    assert list_pod_uids(cache) == set()
    other = cache.observed("s2")
    assert other is not None
    assert len(other.pods) == 1


def test_children_are_stored_by_kind_and_name_without_status(cache: Cache) -> None:
    service = make_pod("svc", 2) | {"spec": {"clusterIP": "None"}}
    service["metadata"] |= {"managedFields": [{}], "labels": {"a": "b"}}
    assert cache.apply_event(SERVICE, False, service) == {"s1"}
    found = cache.observed("s1")
    assert found is not None
    stored = found.children["Service", "pod-svc"]
    assert stored["spec"] == {"clusterIP": "None"}
    assert "managedFields" not in stored["metadata"]
    assert "status" not in stored


def test_node_change_wakes_all_swarms_and_node_heartbeat_none(cache: Cache) -> None:
    def make_node(version: int, ready: str, heartbeat: str) -> Json:
        condition = {"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}
        meta = {"uid": "n", "name": "n", "resourceVersion": str(version)}
        return {"metadata": meta, "status": {"conditions": [condition]}}

    assert cache.apply_event(NODE, False, make_node(2, "True", "1")) == {"s1"}
    assert cache.apply_event(NODE, False, make_node(3, "True", "2")) == set()
    assert cache.apply_event(NODE, False, make_node(4, "Unknown", "3")) == {"s1"}


def test_nodes_are_none_without_read_access(cache: Cache) -> None:
    first = cache.observed("s1")
    assert first is not None
    assert first.nodes is None
    cache.can_read_nodes = True
    second = cache.observed("s1")
    assert second is not None
    assert second.nodes == {}


def test_older_swarm_keeps_a_contested_served_name(
    cache: Cache,
) -> None:
    younger = make_swarm(
        "s2", 2, "other", model={"servedName": "counting"}, created="2026-11-21T11:00:00Z"
    )
    assert cache.apply_event(SWARM, False, younger) == {"s1", "s2"}
    second, first = cache.observed("s2"), cache.observed("s1")
    assert first is not None
    assert second is not None
    assert (first.name_taken_by, second.name_taken_by) == ("", "here/counting")
    assert cache.apply_event(SWARM, True, make_swarm("s1", 9)) == {"s1", "s2"}
    alone = cache.observed("s2")
    assert alone is not None
    assert alone.name_taken_by == ""


def test_served_name_in_use_is_kept_from_an_older_swarm(
    cache: Cache,
) -> None:
    """A suspended swarm may be renamed, without an effect on a swarm that serves."""
    later = "2026-11-21T11:00:00Z"
    younger = make_swarm("s2", 2, "other", model={"servedName": "shared"}, created=later)
    cache.apply_event(SWARM, False, younger | {"status": {"servedName": "shared"}})
    renamed = make_swarm("s1", 3, model={"servedName": "shared"})
    assert cache.apply_event(SWARM, False, renamed | {"status": {"servedName": "counting"}}) == {
        "s1",
        "s2",
    }
    first, second = cache.observed("s1"), cache.observed("s2")
    assert first is not None
    assert second is not None
    assert (first.name_taken_by, second.name_taken_by) == ("here/other", "")


def test_adapter_of_another_swarm_keeps_its_name(cache: Cache) -> None:
    """The gateway knows one model of a name: requests would go to either swarm."""
    model = {"adapters": [{"name": "law", "source": "hf://org/law"}]}
    first = make_swarm("s1", 2, model=model) | {"status": {"adapters": ["law"]}}
    cache.apply_event(SWARM, False, first)
    later, earlier = "2026-11-21T11:00:00Z", "2026-11-21T09:00:00Z"
    cache.apply_event(SWARM, False, make_swarm("s2", 3, "law", created=later))
    cache.apply_event(SWARM, False, make_swarm("s3", 4, "old", model=model, created=earlier))
    seen = {uid: cache.observed(uid) for uid in ("s1", "s2", "s3")}
    taken = {uid: (one.taken_name, one.name_taken_by) for uid, one in seen.items() if one}
    assert taken == {"s1": ("", ""), "s2": ("law", "here/counting"), "s3": ("law", "here/counting")}
    assert cache.apply_event(SWARM, False, make_swarm("s1", 5)) == {"s1", "s2", "s3"}
    alone = cache.observed("s2")
    assert alone is not None and alone.name_taken_by == ""


def test_unreadable_spec_loses_no_name(cache: Cache) -> None:
    status = {"servedName": "llama"}
    cache.apply_event(SWARM, False, make_swarm("s1", 2) | {"spec": {}, "status": status})
    model = {"servedName": "llama"}
    cache.apply_event(SWARM, False, make_swarm("s2", 3, "other", model=model))
    second = cache.observed("s2")
    assert second is not None
    assert (second.taken_name, second.name_taken_by) == ("llama", "here/counting")


def test_names_of_deleted_swarms_are_forgotten(cache: Cache) -> None:
    for number in range(3):
        cache.apply_event(SWARM, False, make_swarm("s2", 10 * number + 2, f"name-{number}"))
        cache.apply_event(SWARM, True, make_swarm("s2", 10 * number + 3, f"name-{number}"))
    assert list(cache._by_name) == ["counting"]


def test_invalid_spec_becomes_a_spec_problem(cache: Cache) -> None:
    bad = make_swarm("s1", 2)
    bad["spec"] = {"model": {"source": "ftp://x"}, "replicas": 1}
    cache.apply_event(SWARM, False, bad)
    found = cache.observed("s1")
    assert found is not None
    assert found.swarm.spec is None
    assert found.swarm.spec_problem.startswith("spec.model.source: ")


def test_rejection_is_forgotten_with_its_slot(cache: Cache) -> None:
    """A slot that is wanted again much later would be reported with the quota of then, and an Event."""

    def rejected_after(version: int, *slots: str) -> set[str]:
        swarm = make_swarm("s1", version)
        swarm["status"] = {"slots": [{"slot": slot, "incarnation": 4} for slot in slots]}
        cache.apply_event(SWARM, False, swarm)
        found = cache.observed("s1")
        assert found is not None
        return set(found.rejected)

    assert rejected_after(2, "0-1", "0-2") == set()
    for what in ("0-1", "0-2", "Service/counting-servers"):
        cache.record_rejection("s1", what, "exceeded quota")
    assert rejected_after(3, "0-1") == {"0-1", "Service/counting-servers"}
    assert rejected_after(4, "0-1", "0-2") == {"0-1", "Service/counting-servers"}


def test_unknown_spec_fields_are_ignored(cache: Cache) -> None:
    newer = make_swarm("s1", 2)
    newer["spec"]["warpDrive"] = True
    cache.apply_event(SWARM, False, newer)
    found = cache.observed("s1")
    assert found is not None
    assert found.swarm.spec is not None


@pytest.mark.parametrize("seed", range(200))
def test_random_events_end_in_the_listed_state(seed: int) -> None:
    """Events arrive late, twice or never; the last list completes the cache."""
    rng, version = random.Random(seed), 1
    store: dict[str, Json] = {}
    history: list[tuple[bool, Json]] = []
    cache = Cache()
    cache.replace(SWARM, [make_swarm("s1", 1)], 1)
    for _ in range(60):
        version += 1
        uid = rng.choice("abcdef")
        if uid in store and rng.random() < 0.3:
            history.append((True, make_pod(uid, version)))
            del store[uid]
            gone = {pod["metadata"]["uid"] for was, pod in history if was}
            assert uid in gone
            continue
        if any(was and pod["metadata"]["uid"] == uid for was, pod in history):
            continue  # uids are not reused
        store[uid] = make_pod(uid, version, phase=rng.choice(["Pending", "Running", "Failed"]))
        history.append((False, store[uid]))
        if rng.random() < 0.5:
            was, pod = rng.choice(history)
            cache.apply_event(POD, was, pod)
        if rng.random() < 0.1:
            cache.replace(POD, list(store.values()), version)
    for was, pod in rng.sample(history, len(history)):
        if rng.random() < 0.7:
            cache.apply_event(POD, was, pod)
    cache.replace(POD, list(store.values()), version + 1)
    found = cache.observed("s1")
    assert found is not None
    phases = {pod.uid: pod.phase for pod in found.pods}
    assert phases == {uid: pod["status"]["phase"] for uid, pod in store.items()}


def test_list_with_a_swarm_that_is_nested_deeply_is_read() -> None:
    """The spec of that swarm is refused. All other swarms are served."""
    deep = make_swarm("s1", 2, pools=[{"name": "a", "podTemplate": {"spec": {"x": "deep"}}}])
    text = json.dumps([deep, make_swarm("s2", 2, "other")])
    text = text.replace('"deep"', "[" * 9_980 + "]" * 9_980)
    made, items = Cache(), json.loads(cut_levels(text.encode()))
    assert made.replace(SWARM, items, 2) == {"s1", "s2"}
    refused, served = made.observed("s1"), made.observed("s2")
    assert refused is not None
    assert served is not None
    assert refused.swarm.spec_problem.endswith(": nested too deeply; allowed: fewer levels")
    assert served.swarm.spec is not None


def test_levels_of_an_answer_below_the_limit_are_null() -> None:
    text = '{"]": "}", "a": ' + "[" * 500 + "1" + "]" * 500 + ', "b": [{}]}'
    found = json.loads(cut_levels(text.encode()))
    assert (found["]"], found["b"]) == ("}", [{}])
    levels, inner = 1, found["a"]
    while inner:
        [inner] = inner
        levels += 1
    assert (levels, inner) == (MAX_LEVELS, None)
