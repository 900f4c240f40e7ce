"""A swarm document is accepted whole, or refused with the path and allowed values of every violation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from modelswarm.cli.demo.example import EXAMPLE_TEXT
from modelswarm.errors import DocumentError
from modelswarm.resources.loading import load_document, parse_document
from modelswarm.resources.rules import ACCELERATOR_HAS_DEVICE, ONE_ACCELERATOR
from modelswarm.resources.spec import ModelSwarm, parse_duration
from modelswarm.resources.violations import InvalidDocumentError

EXAMPLE = Path(__file__).parents[3] / "examples" / "counting.yaml"


def make_document(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": "counting"},
        "spec": {"model": {"source": "demo://counting"}, **spec},
    }


def parse(content: dict[str, Any]) -> ModelSwarm:
    return parse_document(yaml.safe_dump(content), "swarm.yaml")


def collect_violations(content: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(InvalidDocumentError) as caught:
        parse(content)
    return caught.value.violations


def test_example_document_is_valid() -> None:
    swarm = load_document(EXAMPLE)

    assert swarm.served_name == "counting"
    assert (swarm.spec.spans.count, swarm.spec.replicas) == (2, 2)


def test_packaged_example_equals_the_example_file() -> None:
    assert parse_document(EXAMPLE_TEXT, "the example") == load_document(EXAMPLE)


def test_omitted_fields_get_their_defaults() -> None:
    spec = parse(make_document()).spec

    assert (spec.replicas, spec.paused, spec.pools) == (1, False, ())
    assert (spec.spans.count, spec.spans.ranges) == (None, None)
    assert (spec.model.dtype, spec.model.quantization) == ("auto", "none")
    assert (spec.sessions.hold_limit, spec.rollout.surge) == ("5m", 1)


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 0},
        {"spans": {"count": 256}, "replicas": 16},
        {"spans": {"ranges": [{"first": 0, "last": 3}, {"first": 3, "last": 8}]}},
        {"model": {"source": "hf://org/name", "revision": "main", "servedName": "org/name:1"}},
        {"model": {"source": "pvc://claim/path", "tokenSecretRef": {"name": "hub"}}},
        {"model": {"source": "file:///models/a", "dtype": "bfloat16", "quantization": "int8"}},
        {"sessions": {"maxLength": 4096, "concurrent": 1, "holdLimit": "1h30m"}},
        {
            "pools": [
                {
                    "name": "spot",
                    "resources": {
                        "requests": {"cpu": "500m"},
                        "limits": {"nvidia.com/gpu": 1, "memory": "2Gi"},
                    },
                    "podTemplate": {"spec": {"tolerations": [{"key": "spot"}]}},
                    "failureDomainKey": "topology.kubernetes.io/zone",
                },
                {"name": "steady"},
            ]
        },
        {
            "pools": [
                {
                    "name": "gpu",
                    "resources": {"limits": {"nvidia.com/gpu": 1, "rdma/hca": 4}},
                    "accelerator": {"memory": "80Gi"},
                },
                {
                    "name": "claim",
                    "accelerator": {"memory": "80Gi"},
                    "podTemplate": {"spec": {"resourceClaims": [{"name": "gpu"}]}},
                },
            ]
        },
        {"rollout": {"surge": 0, "drainTimeout": "500ms"}, "paused": True},
        {"training": {"memory": "1Gi"}},
        {"training": {"memory": 0}},
    ],
)
def test_valid_spec_is_accepted(spec: dict[str, Any]) -> None:
    assert parse(make_document(**spec)).spec != parse(make_document()).spec


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"model": {"source": "demo://counting", "sorce": 1}},
            (
                "spec.model.sorce: unknown field; allowed: source, revision, servedName, tokenSecretRef, "
                "tokenizer, chatTemplate, dtype, adapters, maxLoraRank, quantization"
            ),
        ),
        (
            {"replica": 2},
            (
                "spec.replica: unknown field; allowed: model, spans, replicas, sessions, training, "
                "pools, rollout, paused"
            ),
        ),
        ({"replicas": -1}, "spec.replicas: -1 is not allowed; allowed: 0 or more"),
        ({"replicas": "2"}, "spec.replicas: '2' is not allowed; allowed: a whole number"),
        ({"replicas": True}, "spec.replicas: True is not allowed; allowed: a whole number"),
        (
            {"spans": {"count": 256}, "replicas": 17},
            "spec.replicas: 17 servers for each of 256 spans are 4352; allowed: at most 16 per span, 4096 together",
        ),
        ({"spans": {"count": 0}}, "spec.spans.count: 0 is not allowed; allowed: 1 or more"),
        (
            {"spans": {"ranges": []}},
            "spec.spans.ranges: [] is not allowed; allowed: at least 1 item",
        ),
        (
            {"spans": {"ranges": [{"first": 0, "last": 4}, {"first": 5, "last": 8}]}},
            "spec.spans.ranges: item 1 (first: 5, last: 8) leaves a gap; allowed here: first: 4",
        ),
        (
            {"spans": {"ranges": [{"first": 0, "last": 4}, {"first": 3, "last": 8}]}},
            "spec.spans.ranges: item 1 (first: 3, last: 8) overlaps the range before it; allowed here: first: 4",
        ),
        (
            {"spans": {"ranges": [{"first": 1, "last": 4}]}},
            "spec.spans.ranges: item 0 (first: 1, last: 4) leaves a gap; allowed here: first: 0",
        ),
        (
            {"spans": {"ranges": [{"first": 0, "last": 4, "end": 1}]}},
            "spec.spans.ranges[0].end: unknown field; allowed: first, last",
        ),
        (
            {"spans": {"count": 1, "ranges": [{"first": 0, "last": 4}]}},
            "spec.spans: count and ranges exclude each other; allowed: one of them, or neither",
        ),
        (
            {"model": {"source": "hf://a/b", "revision": "../../x"}},
            "spec.model.revision: '../../x' is not allowed; allowed: a path without `..`",
        ),
        (
            {"model": {"source": "hf://a/b@../x"}},
            "spec.model.source: 'hf://a/b@../x' is not allowed; allowed: a path without `..`",
        ),
        (
            {"model": {"source": "s3://bucket"}},
            (
                "spec.model.source: 's3://bucket' is not allowed; "
                "allowed: demo://NAME, hf://OWNER/NAME, pvc://CLAIM/PATH or file:///PATH"
            ),
        ),
        (
            {"model": {"source": "demo://counting", "dtype": "float8"}},
            "spec.model.dtype: 'float8' is not allowed; allowed: 'auto', 'float32', 'bfloat16' or 'float16'",
        ),
        (
            {"sessions": {"holdLimit": 30}},
            (
                "spec.sessions.holdLimit: 30 is not allowed; "
                "allowed: a duration such as 500ms, 30s, 5m or 1h30m, more than 0 and at most 24h"
            ),
        ),
        (
            {"sessions": {"maxLength": 0}},
            "spec.sessions.maxLength: 0 is not allowed; allowed: 1 or more",
        ),
        (
            {"pools": [{"name": "a", "resources": {"limits": {"memory": "2Gb"}}}]},
            (
                "spec.pools[0].resources.limits.memory: '2Gb' is not allowed; "
                "allowed: a quantity such as 1, 500m or 2Gi"
            ),
        ),
        (
            {"pools": [{"name": "a"}, {"name": "a"}]},
            "spec.pools: 'a' names more than one pool; allowed: names that differ",
        ),
        ({"pools": {"name": "a"}}, "spec.pools: {'name': 'a'} is not allowed; allowed: a list"),
        ({"paused": "yes"}, "spec.paused: 'yes' is not allowed; allowed: true or false"),
        (
            {"pools": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": 2}}}]},
            f"spec.pools[0].resources: not allowed; allowed: {ONE_ACCELERATOR.allowed}",
        ),
        (
            {"pools": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": 0}}}]},
            f"spec.pools[0].resources: not allowed; allowed: {ONE_ACCELERATOR.allowed}",
        ),
        (
            {"pools": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "500m"}}}]},
            f"spec.pools[0].resources: not allowed; allowed: {ONE_ACCELERATOR.allowed}",
        ),
        (
            {
                "pools": [
                    {
                        "name": "a",
                        "resources": {"limits": {"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb": 1}},
                    }
                ]
            },
            f"spec.pools[0].resources: not allowed; allowed: {ONE_ACCELERATOR.allowed}",
        ),
        (
            {"pools": [{"name": "a", "accelerator": {"memory": "80Gi"}}]},
            f"spec.pools[0]: not allowed; allowed: {ACCELERATOR_HAS_DEVICE.allowed}",
        ),
    ],
)
def test_violation_names_its_path_and_the_allowed_values(
    spec: dict[str, Any], expected: str
) -> None:
    assert collect_violations(make_document(**spec)) == (expected,)


def test_null_field_is_an_absent_one() -> None:
    """The API server drops it, so that `pools:` whose items are comments is no fault of a document."""
    names = ("spans", "replicas", "sessions", "training", "pools", "rollout", "paused")
    content = make_document(**dict.fromkeys(names))
    content["metadata"]["labels"] = None
    content["spec"]["model"] |= {"dtype": None, "adapters": None}
    assert parse(content) == parse(make_document())
    content["spec"]["model"]["source"] = None
    assert collect_violations(content)[0].startswith("spec.model.source: required.")
    assert collect_violations(make_document(pool=None)) != ()


@pytest.mark.parametrize("name", ["Counting", "1st", "a-", "a_b", "ünder", "", "a" * 41, "a.b"])
def test_name_invalid_for_a_service_is_refused(name: str) -> None:
    content = make_document()
    content["metadata"]["name"] = name

    assert collect_violations(content)[0].startswith("metadata.name: ")


def test_all_violations_are_listed_at_once() -> None:
    content = make_document(replicas=-1, paused=1)
    content["kind"] = "Swarm"
    del content["spec"]["model"]["source"]

    violations = collect_violations(content)

    assert [sentence.split(":")[0] for sentence in violations] == [
        "kind",
        "spec.model.source",
        "spec.replicas",
        "spec.paused",
    ]
    assert violations[1].startswith("spec.model.source: required. Address of the weights")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds 0 documents; allowed: exactly one ModelSwarm"),
        ("---\n# nothing\n", "holds 0 documents; allowed: exactly one ModelSwarm"),
        ("a: 1\n---\nb: 2\n", "holds 2 documents; allowed: exactly one ModelSwarm"),
        ("- 1\n", "not a mapping; a ModelSwarm has fields such as `apiVersion:`"),
        ("spec:\n  a: 1\n  a: 2\n", "line 3, column 3: not YAML: the key 'a' appears twice"),
        ("spec: [1\n", "line 2, column 1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: &x 1\nb: *x\n", "line 2, column 4: not YAML: aliases are not allowed"),
        (
            "a: \x01\n",
            "not YAML: unacceptable character #x0001: special characters are not allowed",
        ),
        ("[" * 10_000, "nested too deeply; not a swarm document"),
    ],
)
def test_text_other_than_one_yaml_document_is_refused(text: str, expected: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_document(text, "swarm.yaml")

    assert str(caught.value) == f"swarm.yaml: {expected}"


def test_python_object_in_yaml_is_refused() -> None:
    with pytest.raises(DocumentError, match="could not determine a constructor"):
        parse_document("a: !!python/object/apply:os.system [true]", "swarm.yaml")


def test_unreadable_file_is_named_with_the_reason(tmp_path: Path) -> None:
    binary, large = tmp_path / "binary.yaml", tmp_path / "large.yaml"
    binary.write_bytes(b"a: \xff")
    large.write_text("#" * (1 << 20) + "\n")

    for path, reason in [
        (tmp_path / "absent.yaml", "no such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (binary, "not UTF-8 text (byte 3)"),
        (large, "larger than 1048576 bytes; not a swarm document"),
        (Path("/dev/zero"), "larger than 1048576 bytes; not a swarm document"),
    ]:
        with pytest.raises(DocumentError) as caught:
            load_document(path)
        assert str(caught.value) == f"{path}: {reason}"


def test_every_field_has_a_description() -> None:
    schema = ModelSwarm.model_json_schema()
    parts = [schema, *schema["$defs"].values()]

    for part in parts:
        for name, field in part.get("properties", {}).items():
            assert len(field.get("description", "")) > 10, f"{part['title']}.{name}"


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("500ms", 0.5), ("1h30m", 5400.0), ("1.5s", 1.5)]
)
def test_duration_parses_to_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)
