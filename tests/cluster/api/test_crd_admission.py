"""The API server refuses an invalid swarm with field and message, and accepts a valid one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kubernetes.api_client import ApiClient, SwarmApi, created, install_crd, swarm

from tools.devcluster.control_plane.api_level import ApiLevel

Json = dict[str, Any]
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def level(api: ApiLevel) -> ApiLevel:
    install_crd(api)
    return api


@pytest.fixture(scope="module")
def tried(level: ApiLevel) -> Iterator[SwarmApi]:
    """Yield one namespace for all dry runs."""
    with level.namespace() as name, ApiClient(level) as client:
        yield SwarmApi(client, name)


@pytest.fixture
def swarms(level: ApiLevel, namespace: str) -> Iterator[SwarmApi]:
    with ApiClient(level) as client:
        yield SwarmApi(client, namespace)


def pool(**changes: Any) -> Json:
    return {"pools": [{"name": "a", **changes}]}


def contains(stored: Any, given: Any) -> bool:
    """Say whether all given fields are stored, maybe with defaults."""
    if isinstance(given, dict):
        return all(name in stored and contains(stored[name], given[name]) for name in given)
    if isinstance(given, list):
        return len(stored) == len(given) and all(map(contains, stored, given))
    return bool(stored == given)


def ranges(*pairs: tuple[int, int]) -> Json:
    return {"spans": {"ranges": [{"first": first, "last": last} for first, last in pairs]}}


def model(**changes: Any) -> Json:
    return {"model": {"source": "demo://counting", **changes}}


def test_omitted_fields_get_their_defaults(swarms: SwarmApi) -> None:
    stored = created(swarms.create(swarm()))

    assert stored["spec"] == {
        "model": {
            "source": "demo://counting",
            "dtype": "auto",
            "maxLoraRank": 16,
            "quantization": "none",
        },
        "replicas": 1,
        "sessions": {"holdLimit": "5m"},
        "rollout": {"surge": 1, "drainTimeout": "5m"},
        "paused": False,
    }


GOOD: list[Json] = [
    {"replicas": 0},
    {"replicas": 1000},
    {"spans": {"count": 256}, "replicas": 16},
    ranges((0, 3), (3, 8)),
    ranges(*((i, i + 1) for i in range(256))),
    model(source="hf://org/name", revision="refs/pr/1", servedName="org/name:1"),
    model(source="hf://gpt2@main"),
    model(source="pvc://claim-0.a/path/to/model-ü", tokenSecretRef={"name": "hub"}),
    model(source="file:///models/a", dtype="bfloat16", tokenizer="hf://org/words"),
    model(chatTemplate="{{ messages }}" * 4000),
    {"sessions": {"maxLength": 4096, "concurrent": 1, "holdLimit": "1h30m"}},
    {"rollout": {"surge": 0, "drainTimeout": "500ms"}, "paused": True},
    {"training": {"memory": "1Gi"}},
    {"training": {"memory": 0}},
    pool(resources={"requests": {"cpu": "500m"}, "limits": {"memory": "2Gi"}}),
    pool(resources={"limits": {"nvidia.com/gpu": 1, "cpu": 2, "hugepages-2Mi": "4Mi"}}),
    pool(resources={"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": 1}}),
    pool(resources={"requests": {"memory": "1G"}, "limits": {"memory": "1Gi"}}),
    pool(failureDomainKey="topology.kubernetes.io/zone"),
    pool(podTemplate={"spec": {"tolerations": [{"key": "spot"}], "hostname": "kept"}}),
    {"pools": [{"name": f"pool-{i}"} for i in range(32)]},
    pool(
        resources={"limits": {"nvidia.com/gpu": 1, "rdma/hca": 4}}, accelerator={"memory": "80Gi"}
    ),
    pool(
        accelerator={"memory": "80Gi"},
        podTemplate={"spec": {"resourceClaims": [{"name": "gpu"}]}},
    ),
]


@pytest.mark.parametrize("spec", GOOD, ids=lambda spec: json.dumps(spec)[:60])
def test_valid_spec_is_stored_unchanged(tried: SwarmApi, spec: Json) -> None:
    stored = created(tried.create(swarm(**spec), dry_run=True))

    assert contains(stored["spec"], spec)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_every_example_is_accepted(tried: SwarmApi, path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))

    assert contains(created(tried.create(document, dry_run=True))["spec"], document["spec"])


BAD: list[tuple[Json, str, str]] = [
    (ranges((0, 4), (5, 8)), "spec.spans.ranges", "there is a gap between two ranges"),
    (ranges((0, 4), (3, 8)), "spec.spans.ranges", "a range overlaps the one before it"),
    (ranges((1, 4)), "spec.spans.ranges", "the first range must begin at block 0"),
    (ranges((0, 0)), "spec.spans.ranges[0].last", "greater than or equal to 1"),
    (ranges((0, 4), (4, 4)), "spec.spans.ranges[1]", "last must be greater than first"),
    (ranges((0, 4), (4, 2)), "spec.spans.ranges[1]", "last must be greater than first"),
    ({"spans": {"ranges": []}}, "spec.spans.ranges", "at least 1 items"),
    (ranges(*((i, i + 1) for i in range(257))), "spec.spans.ranges", "at most 256 items"),
    (
        {"spans": {"count": 2, **ranges((0, 4))["spans"]}},
        "spec.spans",
        "count and ranges exclude each other; allowed: one of them, or neither",
    ),
    ({"spans": {"count": 0}}, "spec.spans.count", "greater than or equal to 1"),
    ({"spans": {"count": 257}}, "spec.spans.count", "less than or equal to 256"),
    ({"replicas": -1}, "spec.replicas", "greater than or equal to 0"),
    ({"spans": {"count": 256}, "replicas": 17}, "spec.replicas", "at most 4096 servers"),
    ({**ranges(*((i, i + 1) for i in range(5))), "replicas": 820}, "spec.replicas", "4096"),
    ({"replicas": "2"}, "spec.replicas", "must be of type integer"),
    ({"replicas": 1.5}, "spec.replicas", "must be of type integer"),
    (model(source="s3://bucket"), "spec.model.source", "allowed: demo://NAME, hf://OWNER/NAME"),
    (model(source="counting"), "spec.model.source", "allowed: demo://NAME, hf://OWNER/NAME"),
    (model(source="hf://a/b/c"), "spec.model.source", "allowed: demo://NAME, hf://OWNER/NAME"),
    (model(source="file://models/a"), "spec.model.source", "or file:///PATH"),
    (model(source="pvc://claim/../x"), "spec.model.source", "allowed: a path without `..`"),
    (model(source="pvc://Claim/x"), "spec.model.source", "pvc://CLAIM/PATH"),
    (model(source="hf://a/b\nc"), "spec.model.source", "hf://OWNER/NAME"),
    (model(source="hf://a/" + "b" * 1100), "spec.model.source", "more than 1024 bytes"),
    (model(tokenizer="ftp://x"), "spec.model.tokenizer", "allowed: demo://NAME"),
    (
        model(revision="main"),
        "spec.model.revision",
        "allowed only with an hf:// source that does not contain a revision itself",
    ),
    (
        model(source="hf://a/b@main", revision="main"),
        "spec.model.revision",
        "allowed only with an hf:// source that does not contain a revision itself",
    ),
    (model(source="hf://a/b", revision="x y"), "spec.model.revision", "without blanks and @"),
    (model(source="hf://a/b", revision="../x"), "spec.model.revision", "a path without `..`"),
    (model(source="hf://a/b@../x"), "spec.model.source", "a path without `..`"),
    (model(servedName="-x"), "spec.model.servedName", "a letter or digit first"),
    (model(servedName="x" * 129), "spec.model.servedName", "128"),
    (model(tokenSecretRef={"name": "A"}), "spec.model.tokenSecretRef.name", "name of a Secret"),
    (model(tokenSecretRef={}), "spec.model.tokenSecretRef.name", "Required value"),
    (model(dtype="float8"), "spec.model.dtype", 'supported values: "auto", "float32"'),
    (model(quantization="int2"), "spec.model.quantization", "supported values"),
    (model(chatTemplate=""), "spec.model.chatTemplate", "at least 1 chars"),
    ({"model": {}}, "spec.model.source", "Required value"),
    ({"sessions": {"holdLimit": "0s"}}, "spec.sessions.holdLimit", "more than 0 and at most 24h"),
    ({"sessions": {"holdLimit": "25h"}}, "spec.sessions.holdLimit", "more than 0 and at most 24h"),
    ({"sessions": {"holdLimit": "-1s"}}, "spec.sessions.holdLimit", "a duration such as 500ms"),
    ({"sessions": {"holdLimit": "99999h99999h"}}, "spec.sessions.holdLimit", "at most 24h"),
    ({"rollout": {"drainTimeout": "5"}}, "spec.rollout.drainTimeout", "a duration such as 500ms"),
    ({"rollout": {"drainTimeout": 5}}, "spec.rollout.drainTimeout", "must be of type string"),
    ({"rollout": {"surge": -1}}, "spec.rollout.surge", "greater than or equal to 0"),
    ({"sessions": {"maxLength": 0}}, "spec.sessions.maxLength", "greater than or equal to 1"),
    (
        {"training": {"memory": "1Gb"}},
        "spec.training.memory",
        "allowed: a quantity such as 1, 500m or 2Gi",
    ),
    (
        {"training": {"memory": -1}},
        "spec.training.memory",
        "allowed: a quantity such as 1, 500m or 2Gi",
    ),
    ({"pools": [{"name": "a"}, {"name": "a"}]}, "spec.pools[1]", "Duplicate value"),
    ({"pools": [{"name": "A"}]}, "spec.pools[0].name", "allowed: lower-case letters, digits"),
    ({"pools": [{}]}, "spec.pools[0].name", "Required value"),
    ({"pools": [{"name": f"p{i}"} for i in range(33)]}, "spec.pools", "at most 32 items"),
    (
        pool(resources={"limits": {"memory": "2Gb"}}),
        "spec.pools[0].resources.limits",
        "allowed: a quantity such as 1, 500m or 2Gi",
    ),
    (
        pool(resources={"limits": {"memory": -1}}),
        "spec.pools[0].resources.limits",
        "allowed: a quantity such as 1, 500m or 2Gi",
    ),
    (
        pool(resources={"requests": {"memory": "2Gi"}, "limits": {"memory": "2G"}}),
        "spec.pools[0].resources",
        "allowed: requests that are not above the limits",
    ),
    (
        pool(resources={"requests": {"nvidia.com/gpu": 1}}),
        "spec.pools[0].resources",
        "only with an equal limit",
    ),
    (
        pool(resources={"limits": {"nvidia.com/gpu": 2}}),
        "spec.pools[0].resources",
        "allowed: at most one accelerator",
    ),
    (
        pool(resources={"limits": {"nvidia.com/gpu": 0}}),
        "spec.pools[0].resources",
        "allowed: at most one accelerator",
    ),
    (
        pool(resources={"limits": {"nvidia.com/gpu": "500m"}}),
        "spec.pools[0].resources",
        "allowed: at most one accelerator",
    ),
    (
        pool(resources={"limits": {"nvidia.com/gpu": 1, "amd.com/gpu": 1}}),
        "spec.pools[0].resources",
        "allowed: at most one accelerator",
    ),
    (
        pool(accelerator={"memory": "80Gi"}),
        "spec.pools[0]",
        "allowed: accelerator only in a pool with an accelerator",
    ),
    (
        pool(accelerator={"memory": "80Gi"}, podTemplate={"spec": {"resourceClaims": []}}),
        "spec.pools[0]",
        "allowed: accelerator only in a pool with an accelerator",
    ),
    (
        pool(resources={"limits": {"memroy": "2Gi"}}),
        "spec.pools[0].resources.limits",
        "allowed: cpu, memory, ephemeral-storage",
    ),
    (pool(failureDomainKey="-/-"), "spec.pools[0].failureDomainKey", "the key of a node label"),
    (
        pool(podTemplate={"spec": {"tolerations": "spot"}}),
        "spec.pools[0].podTemplate.spec.tolerations",
        "must be of type array",
    ),
    ({"paused": "yes"}, "spec.paused", "must be of type boolean"),
]


@pytest.mark.parametrize(("spec", "field", "sentence"), BAD, ids=lambda x: json.dumps(x)[:50])
def test_invalid_spec_is_refused_with_field_and_sentence(
    tried: SwarmApi, spec: Json, field: str, sentence: str
) -> None:
    answer = tried.create(swarm(**spec), dry_run=True)

    assert answer.code == 422, answer.body
    causes = [cause for cause in answer.causes if cause.startswith(field)]
    assert any(sentence in cause for cause in causes), answer.causes


@pytest.mark.parametrize("name", ["llama-3.1-8b", "3b", "a" * 41, "a-"])
def test_name_that_no_service_can_have_is_refused(tried: SwarmApi, name: str) -> None:
    answer = tried.create(swarm(name), dry_run=True)

    assert answer.code == 422
    if name != "a-":  # Kubernetes itself refuses it
        assert "metadata.name also names a Service: lower-case letters" in answer.causes[0]
    assert tried.create(swarm("a" * 40), dry_run=True).accepted


def test_all_errors_are_reported_together(tried: SwarmApi) -> None:
    answer = tried.create(
        swarm("x.y", replicas=-1, **model(source="s3://b"), **ranges((0, 4), (5, 6)))
    )

    causes = " ".join(answer.causes)
    for field in ("spec.replicas", "spec.model.source", "spec.spans.ranges"):
        assert field in causes
    assert "metadata.name" in causes


def test_served_name_is_immutable_while_servers_run(swarms: SwarmApi) -> None:
    created(swarms.create(swarm("a", **model(servedName="one"))))

    refused = swarms.merge("a", {"spec": {"model": {"servedName": "two"}}})
    cleared = swarms.merge("a", {"spec": {"model": {"servedName": None}}})

    for answer in (refused, cleared):
        assert answer.code == 422
        assert answer.causes[0].startswith("spec.model.servedName: Forbidden: cannot be changed")
        assert "set spec.replicas to 0 first" in answer.causes[0]
    assert swarms.merge("a", {"spec": {"replicas": 0}}).accepted
    assert swarms.merge("a", {"spec": {"model": {"servedName": "two"}}}).accepted
    assert swarms.merge("a", {"spec": {"replicas": 2}}).accepted
    assert not swarms.merge("a", {"spec": {"model": {"servedName": "one"}}}).accepted


def test_served_name_equal_to_the_name_is_no_change(swarms: SwarmApi) -> None:
    created(swarms.create(swarm("a")))

    assert swarms.merge("a", {"spec": {"model": {"servedName": "a"}}}).accepted
    assert swarms.merge("a", {"spec": {"model": {"servedName": None}}}).accepted


CHANGES: list[Json] = [
    {"model": {"source": "hf://org/name", "revision": "v2"}},
    {"model": {"dtype": "bfloat16"}},
    {"model": {"chatTemplate": "{{ messages }}", "tokenizer": "hf://org/words"}},
    {"spans": {"ranges": [{"first": 0, "last": 8}]}},
    {"spans": {"count": 3}},
    {"replicas": 5},
    {"pools": [{"name": "other"}]},
    {"sessions": {"maxLength": 100, "concurrent": 3, "holdLimit": "1s"}},
    {"rollout": {"surge": 2, "drainTimeout": "1m"}},
    {"training": {"memory": "1Gi"}},
    {"paused": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=json.dumps)
def test_other_fields_can_be_changed_and_restored(swarms: SwarmApi, change: Json) -> None:
    before = created(swarms.create(swarm("a", **pool())))

    changed = created(swarms.merge("a", {"spec": change}))
    back = {"spec": dict.fromkeys(changed["spec"]) | swarm(**pool())["spec"]}
    back["spec"]["model"] = dict.fromkeys(changed["spec"]["model"]) | back["spec"]["model"]
    after = created(swarms.merge("a", back))

    assert changed["spec"] != before["spec"]
    assert after["spec"] == before["spec"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 2


def test_invalid_document_can_be_corrected(swarms: SwarmApi) -> None:
    created(swarms.create(swarm("a", **model(source="hf://org/tpyo"))))

    assert not swarms.merge("a", {"spec": {"model": {"source": "org/typo"}}}).accepted
    assert created(swarms.merge("a", {"spec": {"model": {"source": "hf://org/typo"}}}))


def test_unknown_fields_are_refused_or_dropped_with_warnings(
    swarms: SwarmApi,
) -> None:
    document = swarm("a", replica=2, **pool(podTemplate={"nodeSelector": {"a": "b"}}))

    strict = swarms.create(document)
    lenient = swarms.create(document, strict=False)

    assert strict.code == 400
    assert 'unknown field "spec.replica"' in strict.body["message"]
    assert 'unknown field "spec.pools[0].podTemplate.nodeSelector"' in strict.body["message"]
    assert len(lenient.warnings) == 2
    assert "replica" not in created(lenient)["spec"]


def test_pod_template_is_stored_whole(swarms: SwarmApi) -> None:
    template = {
        "metadata": {"labels": {"team": "ü"}, "annotations": {"a": ""}},
        "spec": {
            "nodeSelector": {"old": None, "new": "x", "$patch": "merge"},
            "containers": [{"name": "server", "env": [{"name": "A", "value": "1"}], "tty": None}],
            "tolerations": [{"$patch": "replace"}, {"key": "spot", "operator": "Exists"}],
            "volumes": None,
            "something": {"of": [{"tomorrow": None}]},
        },
    }

    stored = created(swarms.create(swarm("a", **pool(podTemplate=template))))

    assert stored["spec"]["pools"][0]["podTemplate"] == template


def test_null_means_omitted(swarms: SwarmApi) -> None:
    nothing: Json = dict.fromkeys(("spans", "replicas", "sessions", "pools", "rollout", "paused"))

    stored = created(swarms.create(swarm("a", **nothing)))

    assert stored["spec"] == created(swarms.create(swarm("b")))["spec"]


def test_document_without_a_spec_is_refused(swarms: SwarmApi) -> None:
    document = swarm()
    del document["spec"]

    answer = swarms.create(document)

    assert answer.causes[0] == "spec: Required value"
