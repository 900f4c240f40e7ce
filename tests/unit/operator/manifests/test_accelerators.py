"""Pools with accelerators: flags of their servers, memory of their plan, a server that finds no device."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from support.operator.model_cluster import ModelCluster, inspect_demo_model, make_spec

from modelswarm.errors import DeviceError
from modelswarm.resources.accelerators import check_pool_template
from modelswarm.resources.spec import Pool
from modelswarm_operator.reconcile.model.node_accelerators import find_accelerators
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import ContainerView, NodeView

GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}, "accelerator": {"memory": "1Gi"}}
CLAIM = {
    "accelerator": {"memory": "1Gi"},
    "podTemplate": {
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
            "containers": [{"name": "server", "resources": {"claims": [{"name": "gpu"}]}}],
        }
    },
}
LABEL = "nvidia.com/gpu.memory"
CAPABILITY = "nvidia.com/gpu.compute.major"


def make_cluster(*pools: dict[str, Any], stored: str = "bfloat16", **spec: Any) -> ModelCluster:
    """Return a cluster whose model is stored in a dtype."""
    facts = json.dumps(json.loads(inspect_demo_model()) | {"dtype": stored})
    named = [{"name": f"p{index}", **pool} for index, pool in enumerate(pools)]
    model = {"source": "hf://org/name"}
    return ModelCluster(
        spec=make_spec(1, 1, model=model, pools=named, **spec),
        inspection_result=lambda pod: (0, facts),
    )


def server_flags(cluster: ModelCluster) -> dict[str, str]:
    """Return the flags of the newest server."""
    newest = max(cluster.server_pods(), key=lambda pod: int(pod.view.labels[names.INCARNATION]))
    arguments = newest.manifest["spec"]["containers"][0]["args"]
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


@pytest.mark.parametrize(
    ("pool", "device"),
    [
        ({}, "cpu"),
        ({"resources": {"limits": {"rdma/hca": 1}}}, "cpu"),
        (GPU, "cuda"),
        (GPU | {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, "cuda"),
        (GPU | {"resources": {"limits": {"amd.com/gpu": 1}}}, "cuda"),
        (GPU | {"resources": {"limits": {"gpu.intel.com/xe": 1}}}, "xpu"),
        (GPU | {"resources": {"limits": {"example.com/npu": 1}}}, "accelerator"),
        (CLAIM, "accelerator"),
    ],
)
def test_servers_must_find_the_device_of_their_pool(pool: dict[str, Any], device: str) -> None:
    cluster = make_cluster(pool)
    cluster.settle()
    assert server_flags(cluster)["--device"] == device
    assert server_flags(cluster)["--threads"] == "auto"


def test_resource_claims_reach_the_pod() -> None:
    cluster = make_cluster(CLAIM)
    cluster.settle()
    (pod,) = cluster.server_pods()
    body = pod.manifest["spec"]
    assert body["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    assert body["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]


def asking(amount: int, container: str = "server", kind: str = "containers") -> dict[str, Any]:
    """Return a pod template that asks for GPUs in the limits of a container."""
    resources = {"limits": {"nvidia.com/gpu": amount}}
    return {"spec": {kind: [{"name": container, "resources": resources}]}}


IN_POOL = "spec.pools[0].podTemplate.spec."
IN_CLUSTER = "the operator's --pod-template.spec."
CLAIMS: Any = CLAIM["podTemplate"]


@pytest.mark.parametrize(
    ("pool", "cluster_wide", "field"),
    [
        ({"podTemplate": asking(1)}, {}, f"{IN_POOL}containers[server].resources.limits"),
        ({"podTemplate": asking(2)}, {}, f"{IN_POOL}containers[server].resources.limits"),
        (GPU | {"podTemplate": asking(2)}, {}, f"{IN_POOL}containers[server].resources.limits"),
        ({}, asking(1), f"{IN_CLUSTER}containers[server].resources.limits"),
        (GPU, CLAIMS, f"{IN_CLUSTER}resourceClaims"),
    ],
)
def test_devices_that_no_plan_counts_are_refused(
    pool: dict[str, Any], cluster_wide: dict[str, Any], field: str
) -> None:
    cluster = make_cluster(pool)
    cluster.policy = dataclasses.replace(cluster.policy, pod_template=cluster_wide)
    cluster.settle()
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "InvalidSpec" and degraded["message"].startswith(field)
    assert "allowed: " in degraded["message"] and "resources.limits" in degraded["message"]
    assert not cluster.pods


ASIDE = {"name": "aside", "resources": {"claims": [{"name": "card"}]}}
CARD = {"name": "card", "resourceClaimTemplateName": "one-card"}


@pytest.mark.parametrize(
    ("pool", "claims"),
    [
        (CLAIM, []),
        (GPU | {"podTemplate": asking(1)}, []),
        (
            {
                "accelerator": {"memory": "1Gi"},
                "podTemplate": {
                    "spec": {
                        "resourceClaims": [*CLAIMS["spec"]["resourceClaims"], CARD],
                        "containers": [*CLAIMS["spec"]["containers"], ASIDE],
                    }
                },
            },
            [CARD],
        ),
    ],
)
def test_inspection_gets_no_device(pool: dict[str, Any], claims: list[dict[str, str]]) -> None:
    """A new model would never be inspected where the servers of the former one have all devices."""
    cluster = make_cluster(pool)
    cluster.run_turn()
    (pod,) = cluster.pods.values()
    body = pod.manifest["spec"]
    assert body.get("resourceClaims", []) == claims
    assert "gpu" not in json.dumps(body["containers"][0]["resources"])


NOTHING: list[Any] = [0, None]
ODD: list[Any] = [5, True, [1]]


@pytest.mark.parametrize(
    "pool",
    [
        GPU | {"podTemplate": CLAIMS},  # such as of a network card
        {"podTemplate": asking(1, "aside")},
        GPU | {"podTemplate": asking(1)},
        *({"podTemplate": asking(amount)} for amount in NOTHING),
        *(
            {
                "podTemplate": {
                    "spec": {"containers": [{"name": "server", "resources": {"limits": odd}}]}
                }
            }
            for odd in ODD
        ),
    ],
)
def test_template_without_further_devices_is_not_refused(pool: dict[str, Any]) -> None:
    check_pool_template(Pool.model_validate({"name": "a", **pool}), "podTemplate")


def test_cluster_wide_device_is_refused_without_pools() -> None:
    cluster = make_cluster()
    cluster.policy = dataclasses.replace(cluster.policy, pod_template=asking(1))
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "InvalidSpec"


def test_device_in_a_template_stops_a_stored_plan() -> None:
    """Servers of an earlier operator keep running, and no further one is made."""
    cluster = make_cluster(GPU)
    cluster.settle()
    cluster.policy = dataclasses.replace(cluster.policy, pod_template=asking(1))
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "InvalidSpec"
    assert len(cluster.ready_pods()) == 1


def test_server_fills_its_accelerator_unless_sessions_are_given() -> None:
    filling, given = make_cluster(GPU), make_cluster(GPU, sessions={"concurrent": 2})
    for cluster in (filling, given):
        cluster.settle()
    assert "--pages" not in server_flags(filling)
    assert int(server_flags(given)["--pages"]) == given.status["plan"]["spans"][0]["pages"]
    assert filling.status["plan"]["spans"][0]["host"]["process"] == "3072Mi"


def test_dtype_of_the_plan_is_in_status_and_flags() -> None:
    cluster = make_cluster(GPU)
    cluster.settle()
    assert cluster.status["plan"]["dtype"] == server_flags(cluster)["--dtype"] == "bfloat16"
    assert cluster.status["plan"]["dtypeReason"] == "as the checkpoint is stored"


@pytest.mark.parametrize(
    ("majors", "stored", "dtype"),
    [
        (["7", "9"], "bfloat16", "float32"),
        (["7", "9"], "float16", "float16"),
        (["8", "9"], "bfloat16", "bfloat16"),
        (["", "9"], "bfloat16", "bfloat16"),
        (["", ""], "bfloat16", "bfloat16"),
    ],
)
def test_oldest_gpu_of_all_pools_decides_the_dtype(
    majors: list[str], stored: str, dtype: str
) -> None:
    """A node without the label tells nothing."""
    pools = [
        GPU | {"podTemplate": {"spec": {"nodeSelector": {"kind": kind}}}} for kind in ("a", "b")
    ]
    cluster = make_cluster(*pools, stored=stored)
    for node, kind, major in zip(cluster.nodes.values(), "ab", majors, strict=False):
        node.labels = {"kind": kind} | ({CAPABILITY: major} if major else {})
        node.allocatable = {"nvidia.com/gpu": "1"}
    cluster.settle()
    plan = cluster.status["plan"]
    assert plan["dtype"] == server_flags(cluster)["--dtype"] == dtype
    if dtype != stored:
        assert plan["dtypeReason"] == (
            "a GPU of CUDA capability 7 may be slow at the checkpoint's bfloat16"
        )


def test_pools_that_change_the_dtype_replace_every_server() -> None:
    """Rows are in it, so a server of the other format joins no route."""
    cluster = make_cluster(GPU)
    cluster.settle()
    before = {
        pod.manifest["metadata"]["annotations"][names.MODEL_HASH] for pod in cluster.server_pods()
    }
    cluster.edit_spec(pools=[*cluster.spec["pools"], {"name": "cpu"}])
    cluster.settle()
    after = {
        pod.manifest["metadata"]["annotations"][names.MODEL_HASH] for pod in cluster.server_pods()
    }
    assert server_flags(cluster)["--dtype"] == "float32"
    assert len(before) == len(after) == 1 and before != after


def test_gpu_without_memory_waits_for_field_or_label() -> None:
    pool = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    cluster = make_cluster(pool)
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "InvalidSpec"
    assert "spec.pools[0].accelerator.memory: is needed" in cluster.condition("Degraded")["message"]
    for node in cluster.nodes.values():
        node.labels, node.allocatable = {LABEL: "1024"}, {"nvidia.com/gpu": "1"}
    cluster.settle()
    assert len(cluster.ready_pods()) == 1


def test_stored_plan_does_not_follow_the_nodes() -> None:
    pool = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    cluster = make_cluster(pool)
    for node in cluster.nodes.values():
        node.labels, node.allocatable = {LABEL: "1024"}, {"nvidia.com/gpu": "1"}
    cluster.settle()
    plan = cluster.status["plan"]
    for node in cluster.nodes.values():
        node.labels = {}
    cluster.settle()
    assert cluster.status["plan"] == plan
    assert len(cluster.ready_pods()) == 1


def test_server_without_its_device_degrades_the_swarm() -> None:
    cluster = make_cluster(GPU)
    sentence = (
        "modelswarm-server: --device: cuda is not there: Found no NVIDIA driver; allowed: auto"
    )
    cluster.settle()
    (name,) = cluster.pods
    failed = ContainerView(
        exit_code=DeviceError.exit_code, exit_reason="Error", exit_message=sentence
    )
    cluster.set_pod(name, ready=False, container=failed)
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "DeviceUnusable")
    assert sentence in degraded["message"]


def node(name: str, memory: str, gpus: str = "1", **labels: str) -> NodeView:
    return NodeView(
        name, True, labels={LABEL: memory, **labels}, allocatable={"nvidia.com/gpu": gpus}
    )


NODES = {
    each.name: each
    for each in (
        node("large", "81920", kind="h100"),
        node("small", "24576", kind="l4"),
        node("none", "1024", gpus="0", kind="h100"),
        node("odd", "many", kind="h100"),
    )
}


def test_slice_of_a_gpu_has_a_label_of_its_own() -> None:
    """A node with slices tells the memory of the whole GPU, too."""
    slice_of = "nvidia.com/mig-1g.10gb"
    labels = {LABEL: "81920", f"{slice_of}.memory": "9728"}
    nodes = {"a": NodeView("a", True, labels=labels, allocatable={slice_of: "7"})}
    pool = Pool.model_validate({"name": "a", "resources": {"limits": {slice_of: 1}}})
    assert find_accelerators((pool,), nodes, {}).memory == {"a": 9728 << 20}
    del labels[f"{slice_of}.memory"]
    assert find_accelerators((pool,), nodes, {}).memory == {}


def test_claimed_device_without_memory_asks_for_the_field() -> None:
    cluster = make_cluster({"podTemplate": CLAIM["podTemplate"]})
    for node in cluster.nodes.values():
        node.labels = {LABEL: "1024"}
    cluster.settle()
    message = cluster.condition("Degraded")["message"]
    assert "has a resource claim and no label of a node tells the memory of a claimed" in message


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, 24 << 30),
        ({"kind": "h100"}, 80 << 30),
        ({"kind": "l4"}, 24 << 30),
        ({"kind": "x"}, None),
    ],
)
def test_smallest_gpu_of_matching_nodes_is_the_pools(
    selector: dict[str, str], expected: int | None
) -> None:
    pool = Pool.model_validate(
        {
            "name": "a",
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "podTemplate": {"spec": {"nodeSelector": selector}},
        }
    )
    assert find_accelerators((pool,), NODES, {}).memory.get("a") == expected
    assert find_accelerators((pool,), None, {}).memory == {}
    everywhere = {"spec": {"nodeSelector": {"kind": "l4"}}}
    both = find_accelerators((pool,), NODES, everywhere).memory
    assert both.get("a") == (24 << 30 if selector.get("kind", "l4") == "l4" else both.get("a"))


@pytest.mark.parametrize("selector", [None, {"kind": None}, {"$patch": "replace"}])
def test_cleared_selector_of_all_pods_matches_every_node(selector: dict[str, Any] | None) -> None:
    gpu = {"limits": {"nvidia.com/gpu": 1}}
    template = {"spec": {"nodeSelector": selector}}
    pool = Pool.model_validate({"name": "a", "resources": gpu, "podTemplate": template})
    everywhere = {"spec": {"nodeSelector": {"kind": "h100"}}}
    assert find_accelerators((pool,), NODES, everywhere).memory == {"a": 24 << 30}


def test_memory_of_zero_tells_nothing() -> None:
    pool = Pool.model_validate({"name": "a", "resources": {"limits": {"nvidia.com/gpu": 1}}})
    labels = {LABEL: "0", CAPABILITY: "12"}
    node = NodeView("n", ready=True, labels=labels, allocatable={"nvidia.com/gpu": "1"})
    found = find_accelerators((pool,), {"n": node}, {})
    assert (found.memory, found.capability) == ({}, 12)
