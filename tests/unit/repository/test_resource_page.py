"""docs/modelswarm-resource.md has valid documents and complete tables, docs/kubernetes.md every taint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelswarm.resources.loading import parse_document
from modelswarm.resources.spec import ModelSwarm
from modelswarm_operator.informer.parsing import DEPARTURE_TAINTS
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.status.problems import PRIORITY

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "modelswarm-resource.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def read_section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_document_on_the_page_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)

    assert blocks
    for block in blocks:
        assert isinstance(parse_document(block, "the page"), ModelSwarm)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_every_example_is_valid(path: Path) -> None:
    assert isinstance(parse_document(path.read_text(encoding="utf-8"), path.name), ModelSwarm)


def test_every_condition_reason_is_explained() -> None:
    reasons = set(PRIORITY)
    for part in ("status/condition_rules", "deletion"):
        source = (ROOT / "operator/modelswarm_operator/reconcile" / f"{part}.py").read_text()
        reasons |= set(re.findall(r'(?:READY|PROGRESSING|DEGRADED),\s*\w+,\s*"([A-Z]\w+)"', source))

    assert {"AllServersReady", "Settled", "AsExpected"} < reasons
    explained = set(re.findall(r"`([A-Z]\w+)`", read_section("Conditions")))
    assert reasons - explained == set()


def test_every_label_and_annotation_is_named() -> None:
    labels = [
        label
        for label in vars(names).values()
        if str(label).startswith((f"{names.DOMAIN}/", "app."))
    ]

    assert len(labels) > 10
    for label in labels:
        assert f"`{label}" in PAGE, label


def test_every_taint_of_a_leaving_node_is_listed() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert [taint for taint in DEPARTURE_TAINTS if f"`{taint}`" not in page] == []


def test_protected_pod_template_fields_are_listed() -> None:
    from modelswarm_operator.reconcile.manifests import pod_template

    text = read_section("Pods and the pod template")
    for field in (*pod_template._SPEC, *pod_template._PORTS, *pod_template._ENV):
        assert f"`{field}`" in text, field
