"""A pod inspects each model outside the package before anything is planned."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from support.operator.model_cluster import ModelCluster, Node, inspect_demo_model, make_spec

from modelswarm.checkpoint.inspection import facts_document, inspect_model
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod
from modelswarm_operator.reconcile.state.observed import ContainerView

SOURCE = {"source": "hf://org/name", "revision": "main"}


def make_hub_cluster(**model: Any) -> ModelCluster:
    cluster = ModelCluster(spec=make_spec(2, 2, model={**SOURCE, **model}))
    cluster.run_turn()
    return cluster


def make_facts(revision: str = "c0ffee") -> str:
    found = inspect_model("demo://counting")
    return json.dumps(facts_document(found.facts, revision))


def end_inspection(cluster: ModelCluster, code: int, output: str, phase: str = "") -> None:
    """End the running inspection with this exit code and output."""
    for name, pod in list(cluster.pods.items()):
        if pod.view.labels[names.ROLE] == names.INSPECT:
            container = ContainerView(
                exit_code=code, exit_reason="Error" if code else "Completed", exit_message=output
            )
            ended = phase or ("Failed" if code else "Succeeded")
            pod.view = replace(cluster.pods[name].view, phase=ended, container=container)


def test_one_inspection_pod_starts_and_nothing_else() -> None:
    cluster = make_hub_cluster(tokenSecretRef={"name": "hub"}, tokenizer="hf://org/words")
    (pod,) = cluster.pods.values()
    container = pod.manifest["spec"]["containers"][0]
    assert container["args"] == [
        "--model", "hf://org/name@main", "--tokenizer", "hf://org/words", "--output", "/dev/termination-log",
    ]  # fmt: skip
    assert pod.manifest["spec"]["restartPolicy"] == "Never"
    token = next(item for item in container["env"] if item["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert cluster.condition("Ready")["reason"] == "Inspecting"
    assert cluster.decide().actions == []


def test_inspection_gets_no_half_of_a_servers_parts() -> None:
    """They complete what a server has. Alone the API server refuses them, and no server would ever start."""
    zone = {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    server = {
        "name": "server",
        "startupProbe": {"failureThreshold": 7200},
        "ports": [{"containerPort": 7000, "hostIP": "10.0.0.1"}],
        "lifecycle": {"preStop": {"sleep": {"seconds": 30}}},
        "envFrom": [{"secretRef": {"name": "hub"}}],
    }
    template = {"spec": {"topologySpreadConstraints": [zone], "containers": [server]}}
    pools = [{"name": "a", "podTemplate": template, "failureDomainKey": zone["topologyKey"]}]
    cluster = ModelCluster(spec=make_spec(1, 1, model=SOURCE, pools=pools))
    cluster.run_turn()
    (pod,) = cluster.pods.values()
    body = pod.manifest["spec"]
    (container,) = body["containers"]
    assert "topologySpreadConstraints" not in body
    assert not {"startupProbe", "ports", "lifecycle"} & set(container)
    assert container["envFrom"] == server["envFrom"], "the hub's address or token"
    end_inspection(cluster, 0, make_facts())
    cluster.settle()
    (spread,) = cluster.server_pods()[0].manifest["spec"]["topologySpreadConstraints"]
    assert (spread["whenUnsatisfiable"], spread["maxSkew"]) == ("DoNotSchedule", 1)


def test_deleted_swarm_waits_for_no_drain_of_its_inspection() -> None:
    """`modelswarm-inspect` has no handler for SIGTERM, so its grace period always passes: 1 s, and not 300 s."""
    cluster = make_hub_cluster()
    cluster.delete_swarm()
    (deleted,) = [one for one in cluster.run_turn().actions if isinstance(one, DeletePod)]
    assert deleted.grace_seconds is None, "the pod's own"
    cluster.pass_time(5.0)
    cluster.run_turn()
    assert not cluster.exists


def test_inspection_result_is_stored_and_its_commit_is_served() -> None:
    cluster = make_hub_cluster()
    end_inspection(cluster, 0, make_facts("c0ffee"))
    actions = cluster.run_turn().actions
    (deleted,) = [action.name for action in actions if isinstance(action, DeletePod)]
    assert "inspect" in deleted and not any("inspect" in name for name in cluster.pods)
    assert len([action for action in actions if isinstance(action, CreatePod)]) == 4
    assert cluster.status["model"]["revision"] == "c0ffee"
    assert cluster.status["model"]["source"] == "hf://org/name@main"
    cluster.settle()
    servers = cluster.server_pods()
    assert len(servers) == 4
    arguments = servers[0].manifest["spec"]["containers"][0]["args"]
    assert arguments[:2] == ["--model", "hf://org/name@c0ffee"]
    assert "slots" not in cluster.status


def test_inspected_tokenizer_is_stored_and_not_inspected_again() -> None:
    cluster = make_hub_cluster(tokenizer="hf://org/words")
    end_inspection(cluster, 0, make_facts())
    cluster.settle()
    assert cluster.status["model"]["tokenizer"] == "hf://org/words"
    assert len(cluster.server_pods()) == 4
    cluster = make_hub_cluster()
    end_inspection(cluster, 0, make_facts())
    cluster.settle()
    assert "tokenizer" not in cluster.status["model"]


def test_refused_model_is_reported_and_retried_later() -> None:
    cluster = make_hub_cluster()
    end_inspection(
        cluster, 2, "hf://org/name@main has no tokenizer.json; a fast tokenizer is needed"
    )
    cluster.run_turn()
    degraded = cluster.condition("Degraded")
    assert (
        degraded["reason"] == "ModelRefused" and "a fast tokenizer is needed" in degraded["message"]
    )
    assert cluster.condition("Ready")["reason"] == "ModelRefused"
    for _ in range(3):
        end_inspection(
            cluster, 2, "hf://org/name@main has no tokenizer.json; a fast tokenizer is needed"
        )
        cluster.run_turn()
    assert cluster.wake_at is not None
    before = cluster.status["incarnation"]
    cluster.run_turn()
    assert cluster.status["incarnation"] == before and cluster.decide().actions == []


def test_inspection_that_cannot_be_deleted_fails_once() -> None:
    """A policy may refuse its deletion, and the operator may end before it."""
    cluster = make_hub_cluster()
    end_inspection(cluster, 2, "there is no such model")
    for _ in range(5):
        cluster.run_turn(max_actions=1)
    assert cluster.status["slots"][0]["failures"] == 1
    assert cluster.status["incarnation"] == 2


def test_killed_inspection_is_reported_as_failed() -> None:
    cluster = make_hub_cluster()
    end_inspection(cluster, 137, "")
    cluster.run_turn()
    assert cluster.condition("Degraded")["reason"] == "InspectionFailed"


def test_invalid_inspection_output_is_reported_as_failed() -> None:
    cluster = make_hub_cluster()
    end_inspection(cluster, 0, '{"blocks": 0}')
    cluster.run_turn()
    assert cluster.condition("Degraded")["reason"] == "InspectionFailed"
    assert "not facts of a model" in cluster.condition("Degraded")["message"]


def test_corrected_model_is_inspected_at_once() -> None:
    cluster = make_hub_cluster()
    for _ in range(5):
        end_inspection(cluster, 2, "there is no such model")
        cluster.run_turn()
    cluster.edit_spec(model={"source": "hf://org/right"})
    created = [action for action in cluster.run_turn().actions if isinstance(action, CreatePod)]
    assert len(created) == 1
    end_inspection(cluster, 0, make_facts())
    cluster.settle()
    assert len(cluster.ready_pods()) == 4


def test_inspection_image_pull_failure_is_reported() -> None:
    cluster = make_hub_cluster()
    name = next(iter(cluster.pods))
    cluster.set_pod(
        name, container=ContainerView(waiting="ErrImagePull", waiting_message="manifest unknown")
    )
    cluster.run_turn()
    assert cluster.condition("Degraded")["reason"] == "ImagePullFailed"
    assert "manifest unknown" in cluster.condition("Degraded")["message"]


def test_inspection_has_the_amounts_that_a_quota_demands() -> None:
    """A quota of a namespace refuses pods without requests and limits of its resources."""
    limits = {"memory": "64Gi", "cpu": "50m", "nvidia.com/gpu": 1}
    pools = [{"name": "a", "resources": {"limits": limits}}]
    cluster = ModelCluster(spec=make_spec(2, 2, model=SOURCE, pools=pools))
    cluster.run_turn()
    (pod,) = cluster.pods.values()
    assert pod.manifest["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "50m", "memory": "256Mi"},
        "limits": {"cpu": "50m", "memory": "64Gi"},
    }
    cluster = make_hub_cluster()
    (pod,) = cluster.pods.values()
    assert pod.manifest["spec"]["containers"][0]["resources"] == {}


def test_inspection_without_room_moves_to_another_pool() -> None:
    pools = [{"name": "a"}, {"name": "b"}]
    nodes = {"full": Node("full", capacity=0)}
    cluster = ModelCluster(spec=make_spec(1, 1, model=SOURCE, pools=pools), nodes=nodes)
    found = []
    for _ in range(3):
        cluster.run_turn()
        cluster.pass_time()
        (pod,) = cluster.pods.values()
        found.append(pod.view.annotations[names.POOL])
        cluster.run_turn()
        assert cluster.wake_at is not None
        cluster.now = cluster.wake_at
    assert found == ["a", "b", "a"]


def test_old_servers_stay_while_a_new_model_is_inspected() -> None:
    cluster = ModelCluster()
    cluster.settle()
    old = set(cluster.pods)
    cluster.edit_spec(model=SOURCE)
    cluster.run_turn()
    cluster.pass_time()
    assert old <= set(cluster.ready_pods())
    assert cluster.condition("Ready")["status"] == "True"
    end_inspection(cluster, 0, make_facts())
    cluster.settle()
    assert not old & set(cluster.pods) and len(cluster.ready_pods()) == 4


def test_swarm_stays_ready_while_a_deeper_model_starts() -> None:
    facts = json.dumps(json.loads(make_facts()) | {"blocks": 16})
    cluster = ModelCluster(inspection_result=lambda pod: (0, facts))
    cluster.settle()
    cluster.edit_spec(model=SOURCE)
    for _ in range(40):
        cluster.run_turn()
        assert cluster.condition("Ready")["status"] == "True"
        cluster.pass_time()
    assert cluster.status["spansText"] == "0:8=2/2 8:16=2/2"


def test_swarm_is_suspended_while_its_model_is_unknown() -> None:
    cluster = ModelCluster()
    cluster.settle()
    cluster.inspection_result = lambda pod: (2, "there is no such model")
    cluster.edit_spec(model=SOURCE)
    cluster.run_turn()
    cluster.edit_spec(replicas=0)
    for _ in range(10):
        cluster.run_turn()
        cluster.pass_time()
    assert not cluster.server_pods()
    assert cluster.condition("Ready")["reason"] == "Suspended"
    assert [kind for kind, _ in cluster.children] == ["Service"]


def test_suspended_swarm_inspects_no_model() -> None:
    cluster = ModelCluster(spec=make_spec(2, 0, model=SOURCE))
    cluster.settle()
    assert not cluster.used_incarnations
    assert cluster.condition("Ready")["reason"] == "Suspended"
    assert cluster.condition("Progressing")["reason"] == "Settled"
    cluster.edit_spec(replicas=1)
    cluster.settle()
    assert len(cluster.ready_pods()) == 2


def test_lost_inspection_pod_is_created_again() -> None:
    cluster = make_hub_cluster()
    cluster.force_delete_pod(next(iter(cluster.pods)))
    cluster.run_turn()
    assert len(cluster.pods) == 1
    cluster.pass_time(1.0)
    cluster.delete_pod(next(iter(cluster.pods)))
    cluster.run_turn()
    assert [pod.view.deleting_since is None for pod in cluster.pods.values()].count(True) == 1


def test_pvc_is_mounted_under_its_claim_name() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1, model={"source": "pvc://weights/llama"}))
    cluster.run_turn()
    body = next(iter(cluster.pods.values())).manifest["spec"]
    assert body["volumes"][-1]["persistentVolumeClaim"] == {
        "claimName": "weights",
        "readOnly": True,
    }
    mount = body["containers"][0]["volumeMounts"][-1]
    assert mount == {
        "name": "claim-weights",
        "mountPath": "/mnt/modelswarm/weights",
        "readOnly": True,
    }


WARNING = "hf://org/name@main/chat_template.jinja: the chat template does not compile: line 2: oops"


def warned_facts() -> str:
    return json.dumps({**json.loads(make_facts()), "warnings": [WARNING]})


def chat_events(cluster: ModelCluster) -> list[tuple[str, str]]:
    return [
        (event.kind, event.message) for event in cluster.events if event.reason == "ChatUnavailable"
    ]


def test_template_warning_becomes_an_event_and_ready_stays_true() -> None:
    cluster = make_hub_cluster()
    end_inspection(cluster, 0, warned_facts())
    cluster.settle()
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("True", "AllServersReady")
    assert ready["message"] == f"All 4 servers are ready. {WARNING}"
    assert cluster.condition("Degraded")["status"] == "False"
    assert chat_events(cluster) == [("Warning", WARNING)]
    assert cluster.decide().actions == []


def test_own_chat_template_ends_the_warning() -> None:
    cluster = make_hub_cluster(chatTemplate="{{ messages }}")
    end_inspection(cluster, 0, warned_facts())
    cluster.settle()
    assert cluster.condition("Ready")["message"] == "All 4 servers are ready."
    assert chat_events(cluster) == []


def test_warning_does_not_change_the_plan() -> None:
    plans = []
    for facts in (make_facts(), warned_facts()):
        cluster = make_hub_cluster()
        end_inspection(cluster, 0, facts)
        cluster.settle()
        plans.append(cluster.status["plan"])
    assert plans[0] == plans[1]


def test_model_of_a_refused_plan_is_inspected_once() -> None:
    facts = json.loads(inspect_demo_model())
    spec = make_spec(facts["blocks"] + 1, 1, model={"source": "hf://org/name"})
    cluster = ModelCluster(spec=spec, inspection_result=lambda pod: (0, json.dumps(facts)))
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "InvalidSpec"
    assert cluster.status["model"]["blocks"] == facts["blocks"]
    cluster.edit_spec(spans={"count": 1})
    cluster.settle()
    assert cluster.status["incarnation"] == 2  # the inspection, and the server
