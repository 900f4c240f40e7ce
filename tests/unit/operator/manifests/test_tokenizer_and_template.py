"""A swarm's own tokenizer and chat template reach its pods, and the informer cache does not keep them."""

from __future__ import annotations

from typing import Any

from support.operator.model_cluster import ModelCluster, make_spec

from modelswarm_operator.informer.parsing import pod_view, swarm_view
from modelswarm_operator.reconcile.state.names import CHAT_TEMPLATE

Json = dict[str, Any]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}ü"


def create_first_pod(**model: Any) -> Json:
    cluster = ModelCluster(spec=make_spec(1, 1, model={"source": "demo://counting", **model}))
    cluster.run_turn()
    return next(iter(cluster.pods.values())).manifest


def parse_flags(pod: Json) -> dict[str, str]:
    arguments = pod["spec"]["containers"][0]["args"]
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_chat_template_is_mounted_from_an_annotation() -> None:
    pod = create_first_pod(chatTemplate=TEMPLATE)

    assert pod["metadata"]["annotations"][CHAT_TEMPLATE] == TEMPLATE
    folder, _, name = parse_flags(pod)["--chat-template"].rpartition("/")
    mounts = {m["mountPath"]: m for m in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts[folder]["name"] == "chat-template"
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "chat-template")
    assert volume["downwardAPI"]["items"] == [
        {"path": name, "fieldRef": {"fieldPath": f"metadata.annotations['{CHAT_TEMPLATE}']"}}
    ]


def test_inspection_gets_the_same_tokenizer_and_template() -> None:
    model = {"tokenizer": "pvc://words/a", "chatTemplate": TEMPLATE}
    pod = create_first_pod(source="hf://org/name", **model)

    assert parse_flags(pod)["--tokenizer"] == "pvc://words/a"
    assert "--chat-template" in parse_flags(pod)
    assert "persistentVolumeClaim" in str(pod["spec"]["volumes"])


def test_pod_without_own_tokenizer_gets_no_such_flags() -> None:
    pod = create_first_pod()

    assert not {"--tokenizer", "--chat-template"} & parse_flags(pod).keys()
    assert CHAT_TEMPLATE not in pod["metadata"]["annotations"]
    assert "downwardAPI" not in str(pod["spec"]["volumes"])


def test_patch_cannot_replace_the_chat_template() -> None:
    patch = {"metadata": {"annotations": {CHAT_TEMPLATE: "other", "mine": "kept"}}}
    model = {"source": "demo://counting", "chatTemplate": TEMPLATE}
    cluster = ModelCluster(
        spec=make_spec(1, 1, model=model, pools=[{"name": "a", "podTemplate": patch}])
    )
    cluster.run_turn()

    annotations = next(iter(cluster.pods.values())).manifest["metadata"]["annotations"]
    assert (annotations[CHAT_TEMPLATE], annotations["mine"]) == (TEMPLATE, "kept")


def test_new_chat_template_rolls_the_servers() -> None:
    cluster = ModelCluster(spec=make_spec(1, 1, model={"source": "demo://counting"}))
    cluster.settle()
    before = set(cluster.pods)
    cluster.spec["model"] = {"source": "demo://counting", "chatTemplate": TEMPLATE}
    cluster.generation += 1
    cluster.settle()

    assert set(cluster.pods) != before
    assert cluster.condition("Ready")["status"] == "True"


def test_unserved_quantization_is_reported_and_keeps_servers() -> None:
    cluster = ModelCluster()
    cluster.settle()
    before = set(cluster.pods)
    cluster.spec["model"] = {"source": "demo://counting", "quantization": "int8"}
    cluster.generation += 1
    cluster.settle()

    assert set(cluster.pods) == before
    assert "'int8' is not served yet" in cluster.condition("Degraded")["message"]


def test_large_annotations_are_not_cached() -> None:
    metadata = {
        "name": "a",
        "namespace": "b",
        "uid": "c",
        "resourceVersion": "1",
        "annotations": {
            CHAT_TEMPLATE: "x" * 60000,
            "modelswarm.io/blocks": "0:4",
            "kubectl.kubernetes.io/last-applied-configuration": "x" * 200000,
        },
    }

    assert pod_view({"metadata": metadata}).annotations == {"modelswarm.io/blocks": "0:4"}
    assert swarm_view({"metadata": metadata}).annotations == {"modelswarm.io/blocks": "0:4"}


def test_addresses_name_no_variables_of_the_container() -> None:
    """The kubelet would put the Secret of the token there, and the server's error would show it in status."""
    secret = {"tokenSecretRef": {"name": "database", "key": "password"}}
    address, kept = "file:///$(HF_TOKEN)/a$b", "file:///$$(HF_TOKEN)/a$$b"
    pod = create_first_pod(source=address, tokenizer=address, **secret)
    assert (parse_flags(pod)["--model"], parse_flags(pod)["--tokenizer"]) == (kept, kept)
    adapters = [{"name": "law", "source": address}]
    pod = create_first_pod(tokenizer="demo://counting", adapters=adapters)
    assert parse_flags(pod)["--adapters"] == f"law={kept}"
    assert parse_flags(pod)["--advertise"] == "$(POD_IP):7000"
