"""The dashboard in the chart is the generated one and queries only metrics and labels that are exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from support.kubernetes.prometheus import fill_variables, promtool_fault
from support.kubernetes.queries import NAME, SELECTOR, SUFFIXES, collect_metrics, unknown_labels

from tools.dashboard.rows import ROWS
from tools.make_dashboard import TARGET, render_dashboard

DASHBOARD: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def list_queries() -> Iterator[str]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"]


def test_delivered_dashboard_is_the_generated_one() -> None:
    assert TARGET.read_text(encoding="utf-8") == render_dashboard(), (
        "run python tools/make_dashboard.py"
    )


def test_every_panel_has_title_unit_and_description() -> None:
    assert len(PANELS) > 30
    for panel in PANELS:
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len(panel["description"]) > 20 and panel["description"].endswith("."), panel["title"]
        assert panel["targets"] and all(t["legendFormat"] for t in panel["targets"])
    titles = [(row.title, panel.title) for row in ROWS for panel in row.panels]
    assert len(set(titles)) == len(titles)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for place in places:
        assert place["x"] + place["w"] <= 24
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


def test_data_source_is_a_variable() -> None:
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "installation", "namespace", "model"]
    assert DASHBOARD["schemaVersion"] >= 42
    uids = set(re.findall(r'"uid": "([^"]*)"', TARGET.read_text()))
    assert uids == {"${datasource}"}


def test_every_query_chooses_the_namespace_of_its_process() -> None:
    """Servers are in the namespaces of their swarms, the other processes in that of their installation."""
    for query in list_queries():
        for name in set(NAME.findall(query)) - {
            "process_cpu_seconds_total",
            "process_resident_memory_bytes",
        }:
            chosen = "$namespace" if name.startswith("modelswarm_server_") else "$installation"
            selectors = [inside for found, inside in SELECTOR.findall(query) if found == name]
            assert selectors and all(f'namespace=~"{chosen}"' in each for each in selectors), query


async def test_every_queried_metric_is_exported() -> None:
    known = await collect_metrics()
    queried = {name for query in list_queries() for name in NAME.findall(query)}
    assert len(queried) > 40
    assert not queried - known.keys()


async def test_every_queried_label_belongs_to_its_metric() -> None:
    known = await collect_metrics()
    for query in list_queries():
        assert not unknown_labels(query, known), query


async def test_every_exported_metric_is_queried_or_listed() -> None:
    """The test lists the metrics that another panel shows in another form."""
    queried = {name for query in list_queries() for name in NAME.findall(query)}
    unqueried = {
        family.name
        for name, family in (await collect_metrics()).items()
        if name.startswith(("modelswarm_gateway", "modelswarm_server"))
        and not queried & {family.name + part for part in SUFFIXES[family.type]}
    }
    assert unqueried == {
        "modelswarm_gateway_responses",
        "modelswarm_gateway_build_info",
        "modelswarm_gateway_decode_seconds",
        "modelswarm_gateway_grammar_version_changes",
        "modelswarm_gateway_log_tokens",
        "modelswarm_gateway_model_ready",
        "modelswarm_gateway_numerics_changes",
        "modelswarm_gateway_uncovered_blocks",
        "modelswarm_server_compute_info",
        "modelswarm_server_draining",
        "modelswarm_server_kv_page_tokens",
        "modelswarm_server_kv_recovery_pages",
        "modelswarm_server_threads",
        "modelswarm_server_waiting_sessions",
        "modelswarm_server_weight_product_seconds",
    }


def test_promtool_accepts_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query:{index}", "expr": fill_variables(query, "5m")}
        for index, query in enumerate(list_queries())
    ]
    written = tmp_path / "rules.json"
    written.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert promtool_fault("check", "rules", str(written)) == ""
