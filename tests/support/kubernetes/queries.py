"""PromQL of the chart's dashboard and alerts against the metrics and labels that the processes export."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client.core import Metric

from tools.dashboard.metric_registries import (
    gateway_registry,
    label_names,
    metric_families,
    operator_registry,
    server_registry,
)

NAME = re.compile(r"\b((?:modelswarm|process)_[a-z_]+)")
SELECTOR = re.compile(r"\b((?:modelswarm|process)_[a-z_]+)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|on) \(([a-z_, ]*)\)")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
TARGET_LABELS = {"namespace", "pod", "instance"}


async def collect_metrics() -> dict[str, Metric]:
    """Return the exported metrics by every name usable in a query."""
    registries = (await gateway_registry(), server_registry(), operator_registry())
    return {
        family.name + part: family
        for registry in registries
        for family in metric_families(registry)
        for part in SUFFIXES[family.type]
    }


def unknown_labels(query: str, known: Mapping[str, Metric]) -> set[str]:
    """Return the labels in selectors and groupings that no metric of theirs has."""
    unknown: set[str] = set()
    for name, inside in SELECTOR.findall(query):
        selected = set(re.findall(r"([a-z_]+)(?:=|!=|=~)\"", inside))
        unknown |= selected - {*label_names(known[name]), *TARGET_LABELS}
    grouped = set(", ".join(GROUPING.findall(query)).split(", ")) - {"", "le"}
    labels = {label for name in NAME.findall(query) for label in label_names(known[name])}
    return unknown | (grouped - labels - TARGET_LABELS)
