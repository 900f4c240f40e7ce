"""The chart's alerting rules in promtool's unit tests: two installations in one Prometheus, with series by the minute.

One installation has its gateways and operators in `ai` and its servers in `team-a`. The other one has every fault all
the time, so a rule that looks beyond its installation fires always.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from support.kubernetes.chart import CHART
from support.kubernetes.prometheus import promtool_fault

RULES = CHART / "files" / "alerts.yaml"
MINUTES = 180
FIRED = f'count without (alertstate) (last_over_time(ALERTS{{alertstate="firing"}}[{MINUTES}m]))'
Series = dict[str, str]  # a series and its values, one a minute, in promtool's notation


def fill(text: str, installation: str = "ai", servers: str = "team-a", resync: str = "60") -> str:
    """Return the rules as the chart does: for one installation."""
    text = text.replace("$installation", installation).replace("$namespace", servers)
    return text.replace("$resyncSeconds", resync)


def alerts(installation: str = "ai", servers: str = "team-a") -> list[dict[str, Any]]:
    """Return the filled rules in the order of the file."""
    groups = yaml.safe_load(fill(RULES.read_text(), installation, servers))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def steady(value: float) -> str:
    return f"{value}+0x{MINUTES}"


def counting(per_minute: float) -> str:
    return f"0+{per_minute}x{MINUTES}"


def change(before: float, after: float, at: int = 60, until: int = MINUTES) -> str:
    """Return a gauge that has another value from one minute until another."""
    back = f" {before}+0x{MINUTES - until}" if until < MINUTES else ""
    return f"{before}+0x{at - 1} {after}+0x{until - at - 1}{back}"


def counting_from(at: int, per_minute: float, before: float = 0) -> str:
    """Return a counter that stands still before that minute."""
    return f"{before}+0x{at - 1} {before + per_minute}+{per_minute}x{MINUTES - at}"


def starting(*at: int) -> str:
    """Return the start time of a process that starts again at these minutes."""
    parts = pairwise((0, *at, MINUTES))
    return " ".join(f"{60 * start}+0x{end - start - 1}" for start, end in parts)


def ending(values: str, at: int = 60) -> str:
    """Return the values of a series that exists until that minute only; they must have one part."""
    start, _, _ = values.partition("x")
    return f"{start}x{at - 1} stale"


def gateway(name: str, namespace: str, model: str, faulty: bool = False) -> Series:
    def of(metric: str, **labels: str) -> str:
        own = {"namespace": namespace, "pod": name, **labels}
        return selector(f"modelswarm_gateway_{metric}", own)

    return {
        of("build_info", version="1"): steady(1),
        of("model_ready", model=model): steady(0) if faulty else steady(1),
        of("streams_total", model=model, outcome="completed"): counting(10),
        of("streams_total", model=model, outcome="recovered"): counting(1),
        of("streams_total", model=model, outcome="failed"): counting(9 if faulty else 0.05),
        of("streams_total", model=model, outcome="cancelled"): counting(5),
        of("requests_total", model=model, code="200"): counting(11),
        of("requests_total", model=model, code="429"): counting(9 if faulty else 0.4),
        process(name, namespace): starting(*range(10, 170, 10)) if faulty else steady(0),
    }


def operator(name: str, namespace: str, leads: bool, faulty: bool = False) -> Series:
    def of(metric: str, **labels: str) -> str:
        own = {"namespace": namespace, "pod": name, **labels}
        return selector(f"modelswarm_operator_{metric}", own)

    return {
        of("build_info", version="1"): steady(1),
        of("leader"): steady(int(leads)),
        of("missing_permissions"): steady(3 if faulty else 0),
        of("last_resync_timestamp_seconds"): f"0+60x{MINUTES}" if leads else steady(0),
        of("swarms", condition="Ready", status="True"): steady(int(leads)),
        of("swarms", condition="Ready", status="False"): steady(0),
        of("swarms", condition="Progressing", status="True"): steady(0),
        of("swarms", condition="Degraded", status="True"): steady(9 if faulty else 0),
        process(name, namespace): starting(*range(10, 170, 10)) if faulty else steady(0),
    }


def server(name: str, namespace: str, model: str, faulty: bool = False) -> Series:
    def of(metric: str, **labels: str) -> str:
        own = {"namespace": namespace, "pod": name, "model": model, "blocks": "0:4", **labels}
        return selector(f"modelswarm_server_{metric}", own)

    return {
        of("build_info", version="1"): steady(1),
        of("out_of_memory_steps_total"): counting(5 if faulty else 0),
        process(name, namespace): starting(*range(10, 170, 10)) if faulty else steady(0),
    }


def process(pod: str, namespace: str) -> str:
    return selector("process_start_time_seconds", {"namespace": namespace, "pod": pod})


def selector(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}}"


HEALTH: Series = {
    **gateway("gateway-0", "ai", "m"),
    **gateway("gateway-1", "ai", "m"),
    **operator("operator-0", "ai", leads=True),
    **operator("operator-1", "ai", leads=False),
    **server("m-s0-1", "team-a", "m"),
    **server("m-s1-1", "team-a", "m"),
}
OTHER_INSTALLATION: Series = {
    **gateway("gateway-0", "other", "m", faulty=True),
    **operator("operator-0", "other", leads=False, faulty=True),
    **server("m-s0-1", "team-b", "m", faulty=True),
}


def vary(values: str, name: str, *labels: str) -> Series:
    """Return other values for the healthy series of this name that have these `label=value`."""
    found = [key for key in HEALTH if key.startswith(f"{name}{{") and _has(key, labels)]
    assert found, (name, labels)
    return dict.fromkeys(found, values)


def end(*labels: str, at: int = 60) -> Series:
    """Return all healthy series with these labels, as they end at that minute: their process is gone."""
    found = {key: ending(values, at) for key, values in HEALTH.items() if _has(key, labels)}
    assert found, labels
    return found


def later(at: int, series: Series) -> Series:
    """Return the series as they begin at that minute: their pod is new."""
    return {key: f"_x{at - 1} {values}" for key, values in series.items()}


def _has(key: str, labels: Sequence[str]) -> bool:
    return all(label.replace("=", '="') + '"' in key for label in labels)


def objections(series: Series, expected: Mapping[int, Sequence[str]], folder: Path) -> str:
    """Return "", or promtool's objections: other alerts than the expected ones fired until these minutes."""
    rules, test = folder / "rules.yaml", folder / "test.json"
    rules.write_text(fill(RULES.read_text()))
    tests = [
        {
            "expr": FIRED,
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": each, "value": 1} for each in found],
        }
        for minute, found in expected.items()
    ]
    shown = [{"series": key, "values": values} for key, values in series.items()]
    scene = {"interval": "1m", "input_series": shown, "promql_expr_test": tests}
    content = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [scene]}
    test.write_text(json.dumps(content))
    return promtool_fault("test", "rules", str(test))
