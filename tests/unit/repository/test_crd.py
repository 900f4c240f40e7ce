"""The CRD has every field of the types, and the committed copies are the generated ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

from modelswarm.resources.spec import ModelSwarm, Part, Spec
from modelswarm.resources.status import (
    Condition,
    PlannedSpan,
    PlanStatus,
    SlotStatus,
    SpanStatus,
    Status,
    format_timestamp,
    parse_timestamp,
)
from tools.crd.definition import build_definition
from tools.crd.reference import BEGIN, END, render_reference, replace_reference
from tools.crd.schema import SchemaError, fields_without_description, structural_schema
from tools.make_crd import CHART_FILE, CRD_FILE, REFERENCE_PAGE, render_crd

ROOT = Path(__file__).parents[3]
COPIES = [path for path in (CRD_FILE, CHART_FILE) if path.parent.exists()]


def read_schemas() -> dict[str, Any]:
    version = build_definition()["spec"]["versions"][0]
    properties: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]
    return properties


def list_parts(schema: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [schema]
    for child in schema.get("properties", {}).values():
        parts += list_parts(child)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            parts += list_parts(schema[key])
    return parts


@pytest.mark.parametrize("path", COPIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_committed_crd_is_the_generated_one(path: Path) -> None:
    """`make crd` writes them after a change of the types."""
    assert path.read_text(encoding="utf-8") == render_crd()
    assert yaml.safe_load(render_crd()) == build_definition()


def test_reference_page_is_the_generated_one() -> None:
    page = REFERENCE_PAGE.read_text(encoding="utf-8")

    assert replace_reference(page, build_definition()) == page
    assert page.index(BEGIN) < page.index(END)


def test_limits_of_a_field_are_whole_sentences() -> None:
    table = render_reference(build_definition())
    assert "1 to 512." in table
    assert re.findall(r"[^|]  .{9}", table) == []


def test_every_field_and_rule_has_a_description() -> None:
    for name in ("spec", "status"):
        assert fields_without_description(read_schemas()[name]) == []
        for part in list_parts(read_schemas()[name]):
            for rule in part.get("x-kubernetes-validations", ()):
                assert len(rule["message"]) > 15, rule


def test_schema_has_every_field_of_the_types() -> None:
    for name, model in (("spec", Spec), ("status", Status)):
        aliases = {str(field.alias) for field in model.model_fields.values()}
        assert set(read_schemas()[name]["properties"]) == aliases


def test_schema_has_only_structural_keywords() -> None:
    forbidden = {"$ref", "anyOf", "oneOf", "allOf", "title", "const", "exclusiveMinimum", "pattern"}
    for part in [*list_parts(read_schemas()["spec"]), *list_parts(read_schemas()["status"])]:
        assert not forbidden & part.keys()
        assert "type" in part or "x-kubernetes-int-or-string" in part


def test_schema_defaults_equal_those_of_the_types() -> None:
    swarm = ModelSwarm.parse(
        {
            "apiVersion": "modelswarm.io/v1alpha1",
            "kind": "ModelSwarm",
            "metadata": {"name": "a"},
            "spec": {"model": {"source": "demo://counting"}},
        }
    )

    def fill_defaults(schema: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Fill in defaults as the API server does, outer objects first."""
        result = dict(given)
        for name, child in schema.get("properties", {}).items():
            if name not in result and "default" in child:
                result[name] = child["default"]
            if isinstance(result.get(name), dict):
                result[name] = fill_defaults(child, result[name])
        return result

    spec = fill_defaults(read_schemas()["spec"], {"model": {"source": "demo://counting"}})
    assert Spec.model_validate(spec) == swarm.spec
    assert spec["sessions"] == {"holdLimit": "5m"}
    assert "default" not in str(read_schemas()["status"])


def test_type_without_structural_schema_is_refused() -> None:
    class Union(Part):
        value: int | bool = Field(description="Two types at once.")

    class Multiple(Part):
        value: Annotated[int, Field(multiple_of=3)] = Field(description="Divisible.")

    for model, message in ((Union, "a union is not structural"), (Multiple, "multipleOf")):
        with pytest.raises(SchemaError, match=message):
            structural_schema(model)


def test_exclusive_limits_become_inclusive_ones() -> None:
    class Limited(Part):
        above: Annotated[int, Field(gt=3, lt=9)] = Field(description="Between two numbers.")

    assert structural_schema(Limited)["properties"]["above"] == {
        "description": "Between two numbers.",
        "type": "integer",
        "minimum": 4,
        "maximum": 8,
    }


def test_reference_page_without_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match="the page lacks"):
        replace_reference("# Nothing here\n", build_definition())


# --- status


def test_status_json_has_only_the_set_fields() -> None:
    status = Status(
        observed_generation=2,
        coverage=0,
        model=None,
        plan=PlanStatus(hash="a", spans=(PlannedSpan(index=0, first=0, last=4, pages=9),)),
        spans=(SpanStatus(index=0, blocks="0:4"),),
        slots=(SlotStatus(slot="0-1", failures=1, not_before=None),),
    )

    assert status.to_json() == {
        "observedGeneration": 2,
        "coverage": 0,
        "plan": {"hash": "a", "spans": [{"index": 0, "first": 0, "last": 4, "pages": 9}]},
        "spans": [{"index": 0, "blocks": "0:4"}],
        "slots": [{"slot": "0-1", "failures": 1}],
    }
    assert Status.from_stored(status.to_json()) == status


def test_unknown_status_fields_are_ignored() -> None:
    stored = {
        "conditions": [{"type": "Scaling", "status": "True", "severity": "low"}],
        "autoscaler": {"target": 3},
        "spans": [{"index": 0, "blocks": "0:4", "revision": "x"}],
    }

    status = Status.from_stored(stored)

    assert status.conditions == (Condition(type="Scaling", status="True"),)
    assert status.spans[0].blocks == "0:4"
    assert Status.from_stored({}) == Status()


def test_timestamps_format_in_utc_and_parse_with_offset() -> None:
    assert format_timestamp(1_800_000_000.9) == "2027-01-15T08:00:00Z"
    assert parse_timestamp("2027-01-15T08:00:00Z") == 1_800_000_000
    assert parse_timestamp("2027-01-15T09:00:00.5+01:00") == 1_800_000_000.5
