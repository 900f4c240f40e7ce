"""Every field of a swarm with its smallest, largest, wrong, huge and foreign values.

The API server and `modelswarm up` must agree on each, and a field that is set and cleared leaves nothing behind. The
test walks the schema of the CRD, so it includes new fields.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from support.kubernetes.api_client import CRD, ApiClient, SwarmApi, install_crd

from modelswarm.resources.spec import ModelSwarm
from tools.devcluster.control_plane.api_level import ApiLevel

pytestmark = pytest.mark.full

Json = dict[str, Any]
Path = tuple[str | int, ...]

# A document with every part that has fields.
WHOLE: Json = {
    "apiVersion": "modelswarm.io/v1alpha1",
    "kind": "ModelSwarm",
    "metadata": {"name": "counting"},
    "spec": {
        "model": {
            "source": "hf://org/name",
            "tokenSecretRef": {"name": "hub"},
            "adapters": [{"name": "legal", "source": "hf://org/adapter"}],
        },
        "spans": {"ranges": [{"first": 0, "last": 4}]},
        "replicas": 0,
        "sessions": {},
        "training": {},
        "pools": [{"name": "a", "resources": {"requests": {}, "limits": {"memory": "64Gi"}}}],
        "rollout": {},
    },
}

# A valid non-default value for every field with its own grammar.
GOOD: dict[str, Any] = {
    "source": "pvc://claim/path",
    "tokenizer": "hf://org/words@v1",
    "revision": "v1",
    "servedName": "org/name",
    "name": "spot",
    "key": "hf-token",
    "chatTemplate": "{{ messages }}",
    "holdLimit": "90s",
    "drainTimeout": "90s",
    "failureDomainKey": "topology.kubernetes.io/zone",
    "count": 2,
    "first": 0,
    "last": 8,
    "memory": "1Gi",
    "accelerator": {"memory": "40Gi"},
    "dtype": "float16",
    "quantization": "int8",
    "paused": True,
}
TEXTS = [
    "", "a", "-", ".", "a.", "0", "A", "a b", " a", "a\n", "a\n\n", "\t", "a\x00b", "\x7f", "ü", "模型", "é",
    "a\u00a0b", "a\u2028b", "🐝", "true", "null", "../..", "a/../b", "$(x)", "'", '"', "{}", "1e9", "1Ki", "1K", "1Ei",
    "0s",    "-1", "+1", "1.", ".5", "0.5", "5ms", "24h", "24h0m1s", "1d", "1h1h", "x" * 70000,
    "hf://a", "hf://a/", "hf://a/b/", "hf://a/b@", "hf://a/b@c@d", "hf://ü/b", "hf:/a/b", "HF://a/b", "hf://a b/c",
    "file://", "file:///", "file:///a/..", "file://localhost/a", "file://host/a", "file:///a b", "file:///ü",
    "pvc://", "pvc://a", "pvc://a/", "pvc://a//b", "pvc://a/..b", "pvc://ü/a", "demo://", "demo://x", "demo://x/y",
    "a/b", "a/b/c", "/a", "a/", "a" * 40, "a" * 41, "a" * 128, "a" * 129, "a" * 253, "a" * 254, "a" * 316, "a" * 317,
]  # fmt: skip
NUMBERS = [
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    255,
    256,
    257,
    1000,
    1001,
    10**6,
    10**6 + 1,
    2**31,
    2**53,
    2**63,
    2**64,
]
OTHERS: list[Any] = [1.5, True, False, [], ["a"], {}, {"a": "b"}, [[]], [None]]


def _schema() -> Json:
    definition = yaml.safe_load(CRD.read_text())
    whole = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return dict(whole["properties"]["spec"])


def _leaves(schema: Json, path: Path = ("spec",)) -> Iterator[tuple[Path, Json]]:
    for name, child in schema.get("properties", {}).items():
        if name == "podTemplate":
            continue  # the operator checks these
        yield (*path, name), child
        if child.get("type") == "array":
            yield from _leaves(child["items"], (*path, name, 0))
        elif "additionalProperties" in child:
            yield (*path, name, "memory"), child["additionalProperties"]
        else:
            yield from _leaves(child, (*path, name))


FIELDS = list(_leaves(_schema()))


@pytest.fixture(scope="module")
def swarms(api: ApiLevel) -> Iterator[SwarmApi]:
    install_crd(api)
    with api.namespace() as name, ApiClient(api) as client:
        yield SwarmApi(client, name)


def _document_for(path: Path) -> Json:
    document = copy.deepcopy(WHOLE)
    if path[:3] == ("spec", "spans", "count"):
        del document["spec"]["spans"]["ranges"]
    if "accelerator" in path:  # allowed only in a pool with one
        pool = document["spec"]["pools"][0]
        pool["resources"]["limits"]["nvidia.com/gpu"] = 1
        if path[-1] != "accelerator":
            pool["accelerator"] = {"memory": "40Gi"}
    return document


def _with(path: Path, value: Any) -> Json:
    document = _document_for(path)
    at: Any = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return document


def _values(schema: Json) -> list[Any]:
    values: list[Any] = [*TEXTS, *NUMBERS, *OTHERS, *schema.get("enum", ())]
    if "maxLength" in schema:
        values += ["a" * schema["maxLength"], "ü" * schema["maxLength"]]
    return values


def _parses(document: Json) -> bool:
    try:
        ModelSwarm.parse(document)
    except ValidationError:
        return False
    return True


EVERY_FIELD = pytest.mark.parametrize(
    ("path", "schema"), FIELDS, ids=[".".join(map(str, path[1:])) for path, _ in FIELDS]
)


@EVERY_FIELD
def test_api_server_and_cli_agree_on_every_value(
    swarms: SwarmApi, path: Path, schema: Json
) -> None:
    dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]
    split: dict[str, str] = {}
    accepted = 0
    for value in [*_values(schema), _good(path, schema)]:
        document = _with(path, value)
        answer = swarms.create(document, dry_run=True)
        assert answer.code < 300 or answer.code in (400, 422), (value, answer.body)
        accepted += answer.accepted
        if answer.accepted != _parses(document):
            split[repr(value)[:60]] = f"API server: {answer.accepted} {answer.causes}"
        if answer.code == 422:  # 400: no valid body, or an unknown field, which the message names
            fields = [cause.partition(": ")[0] for cause in answer.causes]
            assert any(_is_about(field, dotted) for field in fields), (value, answer.causes)

    assert not split
    assert accepted, "no value of this field was good"


def _is_about(field: str, path: str) -> bool:
    """Say whether the path is the field, contains it, or is a part of it. Keys of maps are in brackets."""
    field = field.replace("[memory]", ".memory")
    return bool(field) and (path.startswith(field) or field.startswith(path))


def _good(path: Path, schema: Json) -> Any:
    """Return the whole document's value at this path, or a valid value by the field's name."""
    at: Any = WHOLE
    for step in path:
        if isinstance(at, dict) and step not in at:
            return GOOD.get(str(path[-1]), schema.get("maximum", {}))
        at = at[step]
    return at


@EVERY_FIELD
def test_field_set_and_cleared_leaves_nothing(swarms: SwarmApi, path: Path, schema: Json) -> None:
    before = _document_for(path)
    fresh = swarms.create(before)
    assert fresh.accepted, fresh.causes
    try:
        name = str(path[-1])
        value = GOOD.get(name, schema.get("maximum"))
        if value in (None, 0):
            return  # a part of the document, whose fields are tested one by one, or a field with one valid value
        changed = swarms.replace(_with(path, value))
        assert changed.accepted, changed.causes
        back = swarms.replace(before)
        assert back.accepted, back.causes
        assert changed.body["spec"] != fresh.body["spec"]
        assert back.body["spec"] == fresh.body["spec"]
    finally:
        swarms.delete("counting")
