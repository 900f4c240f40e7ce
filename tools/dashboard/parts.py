"""The parts of a Grafana dashboard as plain values, and their JSON.

Used by `rows.py`, which defines the panels, and by `tools/make_dashboard.py`, which writes the file. Knows no metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = 42
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    unit: str  # Grafana's name of the unit
    queries: Sequence[Query]
    kind: str = "timeseries"  # or stat, state-timeline
    width: int = 8  # of 24 columns
    height: int = 8
    stacked: bool = False
    most: float | None = None  # end of the axis
    bad_below: float | None = None  # red below this value
    bad_from: float | None = None  # red from this value
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


def dashboard(title: str, description: str, rows: Sequence[Row], variables: Sequence[Json]) -> Json:
    return {
        "annotations": {"list": []},
        "description": description,
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [],
        "panels": _layout(rows),
        "preload": False,
        "refresh": "10s",
        "schemaVersion": SCHEMA,
        "tags": ["modelswarm"],
        "templating": {"list": list(variables)},
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": title,
        "version": 1,
        "weekStart": "",
    }


def _layout(rows: Sequence[Row]) -> list[Json]:
    """Place the panels of each row from left to right, on as many lines as they need."""
    made: list[Json] = []
    y = 0
    for row in rows:
        made.append(_row(row.title, len(made) + 1, y))
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            made.append(_panel(panel, len(made) + 1, place))
            x += panel.width
            tallest = max(tallest, panel.height)
        y += tallest
    return made


def _row(title: str, number: int, y: int) -> Json:
    place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
    return {
        "collapsed": False,
        "gridPos": place,
        "id": number,
        "panels": [],
        "title": title,
        "type": "row",
    }


def _panel(panel: Panel, number: int, place: Json) -> Json:
    return {
        "datasource": DATASOURCE,
        "description": panel.description,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "gridPos": place,
        "id": number,
        "options": _options(panel),
        "targets": [
            {
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "instant": panel.kind == "stat",
                "legendFormat": query.legend or "__auto",
                "range": panel.kind != "stat",
                "refId": chr(ord("A") + index),
            }
            for index, query in enumerate(panel.queries)
        ],
        "title": panel.title,
        "type": panel.kind,
    }


def _defaults(panel: Panel) -> Json:
    made: Json = {
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "mappings": [],
        "thresholds": {"mode": "absolute", "steps": _steps(panel)},
        "unit": panel.unit,
    }
    if panel.kind != "state-timeline":
        made["min"] = 0
    if panel.most is not None:
        made["max"] = panel.most
    if panel.decimals is not None:
        made["decimals"] = panel.decimals
    if panel.kind == "timeseries":
        made["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.stacked else 8,
            "lineWidth": 1,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        }
    return made


def _steps(panel: Panel) -> list[Json]:
    """Return the colour thresholds, the lowest first."""
    if panel.bad_below is not None:
        soon = {"color": "orange", "value": panel.bad_below}
        good = {"color": "green", "value": panel.bad_below + 1}
        return [{"color": "red", "value": None}, soon, good]
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.bad_from is not None:
        steps.append({"color": "red", "value": panel.bad_from})
    return steps


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        return {
            "colorMode": "value",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "auto",
        }
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    if panel.kind == "state-timeline":
        return {"legend": legend, "mergeValues": True, "showValue": "auto"}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
