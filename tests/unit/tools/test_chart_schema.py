"""The schema of the chart's values accepts the names that Kubernetes accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

CHART = Path(__file__).parents[3] / "charts" / "modelswarm"
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def is_accepted(values: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft7Validator(SCHEMA).is_valid(values))


@pytest.mark.parametrize("component", ["operator", "gateway"])
def test_names_with_dots_are_accepted(component: str) -> None:
    for name, is_valid in (("", True), ("high.example.com", True), ("a..b", False), ("A", False)):
        for values in ({"priorityClassName": name}, {"serviceAccount": {"name": name}}):
            assert is_accepted({component: values}) == is_valid, values
