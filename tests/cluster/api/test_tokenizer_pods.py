"""Pods with a swarm's own tokenizer, template, token and volumes pass an API server that enforces `restricted`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.operator.model_cluster import ModelCluster, make_spec

from tools.devcluster.control_plane.api_level import ApiLevel

Json = dict[str, Any]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}ü"
MODELS: list[Json] = [
    {"source": "demo://counting", "chatTemplate": TEMPLATE},
    {"source": "demo://counting", "chatTemplate": "x" * 65536},
    {"source": "pvc://weights/llama", "tokenizer": "pvc://words.of/tokens"},
    {"source": "hf://org/name", "tokenSecretRef": {"name": "hub"}, "chatTemplate": TEMPLATE},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model)[:60])
def test_pods_with_tokenizer_and_volumes_are_admitted(
    api: ApiLevel, namespace: str, model: Json
) -> None:
    cluster = ModelCluster(spec=make_spec(1, 1, model=model))
    cluster.run_turn()
    manifest = next(iter(cluster.pods.values())).manifest
    manifest["metadata"]["namespace"] = namespace
    manifest["metadata"].pop("ownerReferences")

    kubectl = api.kubectl.in_namespace(namespace)
    pod = kubectl("create", "-f", "-", "--dry-run=server", "-o", "json", stdin=json.dumps(manifest))

    assert json.loads(pod)["metadata"]["annotations"] == manifest["metadata"]["annotations"]
