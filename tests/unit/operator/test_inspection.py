"""A model that is not in the package is looked at by a pod before anything is planned."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from support.operator.model_cluster import World, document

from modelswarm.checkpoint.inspection import facts_document, inspect_model
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod
from modelswarm_operator.reconcile.state.observed import ContainerView

SOURCE = {"source": "hf://org/name", "revision": "main"}


def hub(**model: Any) -> World:
    world = World(spec=document(2, 2, model={**SOURCE, **model}))
    world.turn()
    return world


def facts(revision: str = "c0ffee") -> str:
    found = inspect_model("demo://counting")
    return json.dumps(facts_document(found.facts, revision))


def end(world: World, code: int, words: str, phase: str = "") -> None:
    """The inspection that runs says this and ends."""
    for name, pod in list(world.pods.items()):
        if pod.view.labels[names.ROLE] == names.INSPECT:
            container = ContainerView(
                exit_code=code, exit_reason="Error" if code else "Completed", exit_message=words
            )
            ended = phase or ("Failed" if code else "Succeeded")
            pod.view = replace(world.pods[name].view, phase=ended, container=container)


def test_one_inspection_pod_starts_and_nothing_else() -> None:
    world = hub(tokenSecretRef={"name": "hub"}, tokenizer="hf://org/words")
    (pod,) = world.pods.values()
    container = pod.manifest["spec"]["containers"][0]
    assert container["args"] == [
        "--model", "hf://org/name@main", "--tokenizer", "hf://org/words", "--output", "/dev/termination-log",
    ]  # fmt: skip
    assert pod.manifest["spec"]["restartPolicy"] == "Never"
    token = next(item for item in container["env"] if item["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert world.condition("Ready")["reason"] == "Inspecting"
    assert world.decide().actions == []


def test_inspection_result_is_stored_and_its_commit_is_served() -> None:
    world = hub()
    end(world, 0, facts("c0ffee"))
    actions = world.turn().actions
    assert [a.name for a in actions if isinstance(a, DeletePod)] == [
        name for name in world.pods if "inspect" in name
    ] or not any("inspect" in name for name in world.pods)
    assert len([action for action in actions if isinstance(action, CreatePod)]) == 4
    assert world.status["model"]["revision"] == "c0ffee"
    assert world.status["model"]["source"] == "hf://org/name@main"
    world.settle()
    servers = world.servers()
    assert len(servers) == 4
    arguments = servers[0].manifest["spec"]["containers"][0]["args"]
    assert arguments[:2] == ["--model", "hf://org/name@c0ffee"]
    assert "slots" not in world.status


def test_refused_model_is_reported_and_retried_later() -> None:
    world = hub()
    end(world, 2, "hf://org/name@main has no tokenizer.json; a fast tokenizer is needed")
    world.turn()
    told = world.condition("Degraded")
    assert told["reason"] == "ModelRefused" and "a fast tokenizer is needed" in told["message"]
    assert world.condition("Ready")["reason"] == "ModelRefused"
    for _ in range(3):
        end(world, 2, "hf://org/name@main has no tokenizer.json; a fast tokenizer is needed")
        world.turn()
    assert world.wake_at is not None
    before = world.status["incarnation"]
    world.turn()
    assert world.status["incarnation"] == before and world.decide().actions == []


def test_killed_inspection_is_reported_as_failed() -> None:
    world = hub()
    end(world, 137, "")
    world.turn()
    assert world.condition("Degraded")["reason"] == "InspectionFailed"


def test_invalid_inspection_output_is_reported_as_failed() -> None:
    world = hub()
    end(world, 0, '{"blocks": 0}')
    world.turn()
    assert world.condition("Degraded")["reason"] == "InspectionFailed"
    assert "not facts of a model" in world.condition("Degraded")["message"]


def test_corrected_model_is_inspected_at_once() -> None:
    world = hub()
    for _ in range(5):
        end(world, 2, "there is no such model")
        world.turn()
    world.edit(model={"source": "hf://org/right"})
    created = [action for action in world.turn().actions if isinstance(action, CreatePod)]
    assert len(created) == 1
    end(world, 0, facts())
    world.settle()
    assert len(world.ready()) == 4


def test_inspection_image_pull_failure_is_reported() -> None:
    world = hub()
    name = next(iter(world.pods))
    world.set_pod(
        name, container=ContainerView(waiting="ErrImagePull", waiting_message="manifest unknown")
    )
    world.turn()
    assert world.condition("Degraded")["reason"] == "ImagePullFailed"
    assert "manifest unknown" in world.condition("Degraded")["message"]


def test_old_servers_stay_while_a_new_model_is_inspected() -> None:
    world = World()
    world.settle()
    old = set(world.pods)
    world.edit(model=SOURCE)
    world.turn()
    world.pass_time()
    assert old <= set(world.ready())
    assert world.condition("Ready")["status"] == "True"
    end(world, 0, facts())
    world.settle()
    assert not old & set(world.pods) and len(world.ready()) == 4


def test_lost_inspection_pod_is_created_again() -> None:
    world = hub()
    world.vanish(next(iter(world.pods)))
    world.turn()
    assert len(world.pods) == 1
    world.pass_time(1.0)
    world.kill(next(iter(world.pods)))
    world.turn()
    assert [pod.view.deleting_since is None for pod in world.pods.values()].count(True) == 1


def test_pvc_is_mounted_under_its_claim_name() -> None:
    world = World(spec=document(1, 1, model={"source": "pvc://weights/llama"}))
    world.turn()
    body = next(iter(world.pods.values())).manifest["spec"]
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
