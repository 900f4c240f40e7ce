"""What the operator makes: pods that Pod Security `restricted` lets in, children that are kept right."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.model_cluster import Node, World, document

from modelswarm_operator.reconcile.manifests.owned_objects import covers
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import ApplyChild, DeleteChild, WriteStatus

Json = dict[str, Any]


def pod_of(world: World) -> Json:
    world.turn()
    return next(iter(world.pods.values())).manifest


def patched_pod(template: Json, cluster_wide: Json | None = None) -> Json:
    world = World(spec=document(1, 1, pools=[{"name": "a", "podTemplate": template}]))
    world.policy = type(world.policy)(server_image="i", pod_template=cluster_wide or {})
    return pod_of(world)


@pytest.mark.parametrize("source", ["demo://counting", "hf://org/name", "pvc://weights/llama"])
def test_pods_meet_the_restricted_pod_security_level(source: str) -> None:
    body = pod_of(World(spec=document(1, 1, model={"source": source})))["spec"]
    assert body["securityContext"]["runAsNonRoot"] is True
    assert body["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert body["automountServiceAccountToken"] is False
    for container in body["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    allowed = {"emptyDir", "persistentVolumeClaim"}
    assert all(set(volume) - {"name"} <= allowed for volume in body["volumes"])
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(body)


def test_server_container_gets_its_flags_and_ports() -> None:
    container = pod_of(World(spec=document(2, 1, sessions={"maxLength": 512, "concurrent": 2})))[
        "spec"
    ]["containers"][0]
    flags = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert flags["--blocks"] == "0:4"
    assert flags["--max-length"] == "512"
    assert flags["--advertise"] == "$(POD_IP):7000"
    assert flags["--zone"] == "$(NODE_ZONE)"
    assert flags["--drain-timeout"] == "295"  # of the 300 s that its pod gets to end
    assert flags["--name"].endswith("-s0-1") and flags["--incarnation"] == "1"
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "links": 7000,
        "metrics": 7001,
    }


def test_pod_name_is_unique_and_fits_63_characters() -> None:
    name = names.pod_name("s" * 40, "uid", "s255", 10**10 - 1)
    assert len(name) <= 63
    assert names.incarnation_of_name(name) == 10**10 - 1
    assert names.pod_name("a", "uid-1", "s0", 1) != names.pod_name("a", "uid-2", "s0", 1)


def test_resources_and_failure_domain_come_from_the_pool() -> None:
    pool = {
        "name": "gpu",
        "resources": {"requests": {"cpu": 2}, "limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
        "failureDomainKey": "topology.kubernetes.io/zone",
    }
    body = pod_of(World(spec=document(1, 1, pools=[pool])))["spec"]
    resources = body["containers"][0]["resources"]
    assert resources == {
        "requests": {"cpu": "2"},
        "limits": {"nvidia.com/gpu": "1", "memory": "64Gi"},
    }
    (spread,) = body["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


def test_pool_template_overrides_the_administrators() -> None:
    everywhere = {"spec": {"priorityClassName": "low", "nodeSelector": {"a": "1"}}}
    mine = {"spec": {"priorityClassName": "high", "tolerations": [{"operator": "Exists"}]}}
    body = patched_pod(mine, everywhere)["spec"]
    assert body["priorityClassName"] == "high"
    assert body["nodeSelector"] == {"a": "1"}
    assert body["tolerations"] == [{"operator": "Exists"}]


@pytest.mark.parametrize(
    "template",
    [
        {"metadata": {"name": "x", "labels": {names.SLOT: "9-9", "app.kubernetes.io/name": "x"}}},
        {
            "metadata": {
                "ownerReferences": [{"uid": "x", "name": "x"}],
                "annotations": {names.BLOCKS: "0:1"},
            }
        },
        {"metadata": {"labels": {"modelswarm.io/new": "1"}, "finalizers": ["x/y"]}},
        {"spec": {"restartPolicy": "Never", "hostname": "x", "terminationGracePeriodSeconds": 1}},
        {"spec": {"activeDeadlineSeconds": 5, "subdomain": None}},
        {"spec": {"containers": [{"name": "server", "args": ["--x"], "command": None}]}},
        {
            "spec": {
                "containers": [{"name": "server", "ports": [{"containerPort": 7000, "name": "x"}]}]
            }
        },
        {"spec": {"containers": [{"name": "server", "env": [{"name": "POD_IP", "value": "1"}]}]}},
        {"spec": {"containers": [{"name": "server", "$patch": "delete"}]}},
        {"kind": "Deployment"},
    ],
)
def test_operator_fields_resist_template_patches(template: Json) -> None:
    plain, patched = patched_pod({}), patched_pod(template)
    for pod in (plain, patched):
        pod["metadata"]["annotations"].pop(names.TEMPLATE_HASH)
    plain_container, container = plain["spec"]["containers"][0], patched["spec"]["containers"][0]
    key = {"env": "name", "ports": "containerPort"}
    for part, by in key.items():
        plain_container[part].sort(key=lambda item, by=by: str(item[by]))
        container[part].sort(key=lambda item, by=by: str(item[by]))
    assert patched == plain


def test_added_container_comes_after_the_server() -> None:
    template = {"spec": {"containers": [{"$patch": "replace"}, {"name": "side", "image": "s"}]}}
    containers = patched_pod(template)["spec"]["containers"]
    assert [one["name"] for one in containers] == ["server", "side"]


def test_service_and_budget_per_span_are_created_once() -> None:
    world = World()
    world.settle()
    assert sorted(world.children) == [
        ("PodDisruptionBudget", "counting-s0"),
        ("PodDisruptionBudget", "counting-s1"),
        ("Service", "counting-servers"),
    ]
    budget = world.children["PodDisruptionBudget", "counting-s0"]["spec"]
    assert budget["minAvailable"] == 2 and budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_edited_or_deleted_child_is_restored() -> None:
    world = World()
    world.settle()
    world.children["PodDisruptionBudget", "counting-s0"]["spec"]["minAvailable"] = 0
    del world.children["Service", "counting-servers"]
    applied = [action.manifest for action in world.turn().actions if isinstance(action, ApplyChild)]
    assert sorted(manifest["kind"] for manifest in applied) == ["PodDisruptionBudget", "Service"]
    assert world.decide().actions == []


def test_narrowed_selector_is_not_covered() -> None:
    assert not covers({"selector": {"a": "1", "b": "2"}}, {"selector": {"a": "1"}})
    assert covers({"selector": {"a": "1"}, "more": 1}, {"selector": {"a": "1"}})


def test_budgets_follow_spans_and_replicas() -> None:
    world = World()
    world.settle()
    world.edit(spans={"count": 1}, replicas=1)
    world.settle()
    assert sorted(name for _, name in world.children) == ["counting-s0", "counting-servers"]
    assert world.children["PodDisruptionBudget", "counting-s0"]["spec"]["minAvailable"] == 1
    assert not [action for action in world.decide().actions if isinstance(action, DeleteChild)]


def test_refused_child_is_reported_and_retried_with_backoff() -> None:
    world = World()
    world.settle()
    del world.children["Service", "counting-servers"]
    world.rejected["Service/counting-servers"] = (
        "a Service counting-servers exists already and belongs to another owner"
    )
    attempts = 0
    for _ in range(200):
        decision = world.decide()
        attempts += any(isinstance(action, ApplyChild) for action in decision.actions)
        for action in decision.actions:
            if isinstance(action, WriteStatus):
                world.carry_out(action, world.observe())
        world.now += 1.0
    assert 3 < attempts < 11
    told = world.condition("Degraded")
    assert told["reason"] == "CreateRefused" and "another owner" in told["message"]
    world.rejected.clear()
    world.now += 300.0
    world.turn()
    world.turn()
    assert "slots" not in world.status and world.condition("Degraded")["status"] == "False"


def test_pods_are_spread_over_many_pools() -> None:
    pools = [{"name": f"p{index}"} for index in range(4)]
    world = World(spec=document(2, 4, pools=pools), nodes={"n": Node("n", room=99)})
    world.settle()
    used = [pod.view.annotations[names.POOL] for pod in world.servers()]
    assert {used.count(pool["name"]) for pool in pools} == {2}
