"""Manifests of the operator: pods that Pod Security `restricted` admits, and children that stay as written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.operator.model_cluster import ModelCluster, Node, inspect_demo_model, make_spec

from modelswarm.placement.quantity import bytes_of
from modelswarm_operator.reconcile.manifests.owned_objects import covers
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import ApplyChild, DeleteChild, WriteStatus

Json = dict[str, Any]


def create_first_pod(cluster: ModelCluster) -> Json:
    cluster.run_turn()
    return next(iter(cluster.pods.values())).manifest


def create_patched_pod(template: Json, cluster_wide: Json | None = None) -> Json:
    cluster = ModelCluster(spec=make_spec(1, 1, pools=[{"name": "a", "podTemplate": template}]))
    cluster.policy = type(cluster.policy)(server_image="i", pod_template=cluster_wide or {})
    return create_first_pod(cluster)


@pytest.mark.parametrize("source", ["demo://counting", "hf://org/name", "pvc://weights/llama"])
def test_pods_meet_the_restricted_pod_security_level(source: str) -> None:
    body = create_first_pod(ModelCluster(spec=make_spec(1, 1, model={"source": source})))["spec"]
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
    container = create_first_pod(
        ModelCluster(spec=make_spec(2, 1, sessions={"maxLength": 512, "concurrent": 2}))
    )["spec"]["containers"][0]
    flags = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert flags["--blocks"] == "0:4"
    assert flags["--max-length"] == "512"
    assert flags["--advertise"] == "$(POD_IP):7000"
    assert flags["--zone"] == "$(NODE_ZONE)"
    assert flags["--drain-timeout"] == "295"  # seconds, of the 300 s of its pod's grace period
    assert flags["--name"].endswith("-s0-1") and flags["--incarnation"] == "1"
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "links": 7000,
        "metrics": 7001,
    }


@pytest.mark.parametrize(
    ("training", "flag", "planned"),
    [({}, None, None), ({"memory": "1Gi"}, str(1 << 30), "1024Mi"), ({"memory": 0}, "0", None)],
)
def test_server_gets_the_memory_of_passes(
    training: Json, flag: str | None, planned: str | None
) -> None:
    cluster = ModelCluster(spec=make_spec(1, 1, training=training))
    cluster.settle()
    arguments = next(iter(cluster.server_pods())).manifest["spec"]["containers"][0]["args"]
    assert dict(zip(arguments[::2], arguments[1::2], strict=True)).get("--training-memory") == flag
    memory = cluster.status["plan"]["spans"][0]["memory"]
    assert memory.get("training") == planned


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
    spec = make_spec(1, 1, pools=[pool], sessions={"concurrent": 2})
    body = create_first_pod(ModelCluster(spec=spec))["spec"]
    resources = body["containers"][0]["resources"]
    assert resources == {
        "requests": {"cpu": "2"},
        "limits": {"nvidia.com/gpu": "1", "memory": "64Gi"},
    }
    (spread,) = body["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"
    assert (spread["whenUnsatisfiable"], spread["maxSkew"]) == ("ScheduleAnyway", 1)


def create_hub_server(file_bytes: int, **pool: Any) -> Json:
    """Return the spec of the first server pod of a model of two spans from a hub."""
    facts = json.loads(inspect_demo_model()) | {"fileBytes": file_bytes}
    spec = make_spec(2, 1, model={"source": "hf://org/name"}, pools=[{"name": "a", **pool}])
    cluster = ModelCluster(spec=spec, inspection_result=lambda pod: (0, json.dumps(facts)))
    cluster.settle()
    (first,) = (pod for pod in cluster.server_pods() if pod.view.labels[names.SPAN] == "0")
    body: Json = first.manifest["spec"]
    return body


def disk_limits(body: Json) -> dict[str, str]:
    """Return the size limits of the pod's directories."""
    volumes = (volume for volume in body["volumes"] if "emptyDir" in volume)
    return {volume["name"]: volume["emptyDir"]["sizeLimit"] for volume in volumes}


def test_hub_cache_of_a_server_is_bounded_by_the_models_files() -> None:
    body = create_hub_server(100 << 30)
    assert disk_limits(body) == {"tmp": "1024Mi", "hub-cache": f"{121 << 10}Mi"}
    request = body["containers"][0]["resources"]["requests"]["ephemeral-storage"]
    assert 1 << 30 < bytes_of(request, "request") < 2 << 30, "half of the demo model, and a margin"


def test_hub_cache_has_room_for_adapters_of_a_hub() -> None:
    """The kubelet evicts a pod whose files exceed the limit, again and again."""
    adapters = [{"name": f"a{number}", "source": "hf://org/adapter"} for number in range(64)]
    sizes = []
    for rank in (256, 512):
        model = {"source": "pvc://weights/llama", "adapters": adapters, "maxLoraRank": rank}
        cluster = ModelCluster(spec=make_spec(2, 1, model=model))
        cluster.settle()
        body = cluster.server_pods()[0].manifest["spec"]
        limit = disk_limits(body)["hub-cache"]
        assert body["containers"][0]["resources"]["requests"]["ephemeral-storage"] == limit
        sizes.append(bytes_of(limit, "limit") - (1 << 30))
    assert sizes[0] > 64 << 20 and abs(sizes[1] - 2 * sizes[0]) < 4 << 20


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_disk_request_of_the_pool_replaces_the_operators(kind: str) -> None:
    body = create_hub_server(1, resources={kind: {"ephemeral-storage": "7Gi"}})
    assert body["containers"][0]["resources"] == {kind: {"ephemeral-storage": "7Gi"}}


@pytest.mark.parametrize("source", ["demo://counting", "pvc://weights/llama", "hf://org/name"])
def test_first_pod_of_any_source_has_bounded_directories(source: str) -> None:
    """The first pod of a model outside the image is an inspection."""
    body = create_first_pod(ModelCluster(spec=make_spec(1, 1, model={"source": source})))["spec"]
    assert disk_limits(body) == {"tmp": "1024Mi", "hub-cache": "1024Mi"}
    assert "ephemeral-storage" not in str(body["containers"][0]["resources"])


def test_pool_template_overrides_the_administrators() -> None:
    everywhere = {"spec": {"priorityClassName": "low", "nodeSelector": {"a": "1"}}}
    mine = {"spec": {"priorityClassName": "high", "tolerations": [{"operator": "Exists"}]}}
    body = create_patched_pod(mine, everywhere)["spec"]
    assert body["priorityClassName"] == "high"
    assert body["nodeSelector"] == {"a": "1"}
    assert body["tolerations"] == [{"operator": "Exists"}]


def test_spreading_rule_of_a_pool_counts_servers_of_the_span() -> None:
    """A rule without labelSelector matches no pod. Its author cannot know the labels of a span."""
    rule = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}
    other = {**rule, "topologyKey": "rack", "labelSelector": {"matchLabels": {"a": "b"}}}
    body = create_patched_pod({"spec": {"topologySpreadConstraints": [rule, other]}})["spec"]
    mine, zone, rack = body["topologySpreadConstraints"]
    assert zone == {**rule, "labelSelector": mine["labelSelector"]}
    assert rack == other


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
    plain, patched = create_patched_pod({}), create_patched_pod(template)
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
    containers = create_patched_pod(template)["spec"]["containers"]
    assert [each["name"] for each in containers] == ["server", "side"]


def test_service_and_budget_per_span_are_created_once() -> None:
    cluster = ModelCluster()
    cluster.settle()
    assert sorted(cluster.children) == [
        ("PodDisruptionBudget", "counting-s0"),
        ("PodDisruptionBudget", "counting-s1"),
        ("Service", "counting-servers"),
    ]
    budget = cluster.children["PodDisruptionBudget", "counting-s0"]["spec"]
    assert budget["minAvailable"] == 2 and budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_edited_or_deleted_child_is_restored() -> None:
    cluster = ModelCluster()
    cluster.settle()
    cluster.children["PodDisruptionBudget", "counting-s0"]["spec"]["minAvailable"] = 0
    del cluster.children["Service", "counting-servers"]
    applied = [
        action.manifest for action in cluster.run_turn().actions if isinstance(action, ApplyChild)
    ]
    assert sorted(manifest["kind"] for manifest in applied) == ["PodDisruptionBudget", "Service"]
    assert cluster.decide().actions == []


def test_narrowed_selector_is_not_covered() -> None:
    assert not covers({"selector": {"a": "1", "b": "2"}}, {"selector": {"a": "1"}})
    assert covers({"selector": {"a": "1"}, "more": 1}, {"selector": {"a": "1"}})


def test_claims_of_adapters_are_mounted_once_each() -> None:
    sources = {"a": "pvc://loras/a", "b": "pvc://loras/b", "c": "pvc://others/c"}
    adapters = [{"name": name, "source": source} for name, source in sources.items()]
    model = {"source": "demo://counting", "adapters": adapters}
    spec = create_first_pod(ModelCluster(spec=make_spec(1, 1, model=model)))["spec"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert sorted(claims.values()) == ["loras", "others"]
    mounts = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert claims.keys() <= mounts


def test_volumes_of_similar_claims_have_names_that_differ() -> None:
    """The API server refuses a pod with two volumes of one name."""
    claims = ["a-b", "a.b", f"{'c' * 60}1", f"{'c' * 60}2"]
    adapters = [{"name": f"l{n}", "source": f"pvc://{claim}/l"} for n, claim in enumerate(claims)]
    model = {"source": "demo://counting", "adapters": adapters}
    spec = create_first_pod(ModelCluster(spec=make_spec(1, 1, model=model)))["spec"]
    volumes = [one["name"] for one in spec["volumes"] if "persistentVolumeClaim" in one]
    assert len(set(volumes)) == len(claims) and volumes[0] == "claim-a-b"
    assert all(len(name) <= 63 and "." not in name for name in volumes)


def test_every_wanted_owner_must_be_there_and_others_may() -> None:
    one, two = (
        {"ownerReferences": [{"uid": "a"}]},
        {"ownerReferences": [{"uid": "b"}, {"uid": "a"}]},
    )
    assert covers(two, one) and covers(two, two)
    assert not covers(one, two)


def test_budgets_follow_spans_and_replicas() -> None:
    cluster = ModelCluster()
    cluster.settle()
    cluster.edit_spec(spans={"count": 1}, replicas=1)
    cluster.settle()
    assert sorted(name for _, name in cluster.children) == ["counting-s0", "counting-servers"]
    assert cluster.children["PodDisruptionBudget", "counting-s0"]["spec"]["minAvailable"] == 1
    assert not [action for action in cluster.decide().actions if isinstance(action, DeleteChild)]


def test_budgets_of_old_spans_stay_until_their_servers_go() -> None:
    """Otherwise a drain of nodes evicts all servers of these spans before the new ones serve."""
    cluster = ModelCluster(spec=make_spec(4, 1))
    cluster.settle()
    cluster.edit_spec(spans={"count": 2})
    old = set(cluster.ready_pods())
    while old & set(cluster.ready_pods(2)):
        cluster.run_turn()
        assert ("PodDisruptionBudget", "counting-s2") in cluster.children
        cluster.pass_time()
    cluster.settle()
    assert len(cluster.children) == 3


def test_refused_child_is_reported_and_retried_with_backoff() -> None:
    cluster = ModelCluster()
    cluster.settle()
    del cluster.children["Service", "counting-servers"]
    cluster.rejected["Service/counting-servers"] = (
        "a Service counting-servers exists already and belongs to another owner"
    )
    attempts = 0
    for _ in range(200):
        decision = cluster.decide()
        attempts += any(isinstance(action, ApplyChild) for action in decision.actions)
        for action in decision.actions:
            if isinstance(action, WriteStatus):
                cluster.execute_action(action, cluster.observe())
        cluster.now += 1.0
    assert 3 < attempts < 11
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "CreateRefused" and "another owner" in degraded["message"]
    cluster.rejected.clear()
    cluster.now += 300.0
    cluster.run_turn()
    cluster.run_turn()
    assert "slots" not in cluster.status and cluster.condition("Degraded")["status"] == "False"


def test_pods_are_spread_over_many_pools() -> None:
    pools = [{"name": f"p{index}"} for index in range(4)]
    cluster = ModelCluster(spec=make_spec(2, 4, pools=pools), nodes={"n": Node("n", capacity=99)})
    cluster.settle()
    used = [pod.view.annotations[names.POOL] for pod in cluster.server_pods()]
    assert {used.count(pool["name"]) for pool in pools} == {2}
