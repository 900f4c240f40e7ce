"""Each alert of the chart fires on its fault, and is silent in health; promtool evaluates the rules on made series."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.kubernetes.alerts import (
    HEALTH,
    MINUTES,
    OTHER_INSTALLATION,
    RULES,
    Series,
    alerts,
    change,
    counting,
    counting_from,
    end,
    fill,
    gateway,
    later,
    objections,
    operator,
    selector,
    server,
    starting,
    steady,
    vary,
)
from support.kubernetes.prometheus import promtool_fault
from support.kubernetes.queries import NAME, SELECTOR, collect_metrics, unknown_labels

from tools.make_metrics_page import PAGE

GATEWAY, OPERATOR, SERVER = "modelswarm_gateway", "modelswarm_operator", "modelswarm_server"
READY, SWARMS = f"{GATEWAY}_model_ready", f"{OPERATOR}_swarms"
DEGRADED = vary(change(0, 1), SWARMS, "condition=Degraded", "pod=operator-0")
PROGRESSING = vary(change(1, 0), SWARMS, "condition=Progressing", "pod=operator-0")
UNREADY = {
    **vary(change(0, 1), SWARMS, "condition=Ready", "status=False", "pod=operator-0"),
    **vary(change(1, 0), SWARMS, "condition=Ready", "status=True", "pod=operator-0"),
}
FAILED = vary(counting_from(60, 1), f"{GATEWAY}_streams_total", "outcome=failed", "pod=gateway-1")
# Both gateways know a model without pods for 10 more minutes.
FORGOTTEN = vary("1+0x59 0+0x9 stale", READY)
SERVERS_GONE = end("namespace=team-a")


@dataclass(frozen=True)
class Fault:
    """A fault that begins at minute 60, and the alert that fires because of it."""

    alert: str
    series: Series
    silent_at: int  # the last minute without an alert
    firing_at: int
    labels: dict[str, str]

    @property
    def expected(self) -> str:
        found = next(rule for rule in alerts() if rule["alert"] == self.alert)
        labels = {"alertname": self.alert, **found["labels"], **self.labels}
        return selector("", labels)


HERE, MODEL = {"namespace": "ai"}, {"namespace": "ai", "model": "m"}
FAULTS = {
    "all gateways are gone": Fault(
        "ModelSwarmNoGateway", end("pod=gateway-0") | end("pod=gateway-1"), 64, 65, HERE
    ),
    "a span is lost": Fault(
        "ModelSwarmModelUnavailable",
        vary(change(1, 0), READY) | end("pod=m-s1-1") | DEGRADED | UNREADY,
        64,
        65,
        MODEL,
    ),
    "a gateway has no link": Fault(
        "ModelSwarmServersUnreachable",
        vary(change(1, 0), READY, "pod=gateway-1"),
        64,
        65,
        MODEL,
    ),
    "a gateway has no link while another model is suspended": Fault(
        "ModelSwarmServersUnreachable",
        vary(change(1, 0), READY, "pod=gateway-1")
        | vary(steady(1), SWARMS, "condition=Ready", "status=False", "pod=operator-0"),
        64,
        65,
        MODEL,
    ),
    "a span is lost without an operator": Fault(
        "ModelSwarmServersUnreachable",
        vary(change(1, 0), READY)
        | end("pod=m-s1-1")
        | vary(steady(0), SWARMS)
        | vary(change(1, 0, at=62), f"{OPERATOR}_leader", "pod=operator-0"),
        64,
        65,
        MODEL,
    ),
    "one gateway fails one stream in twenty": Fault(
        "ModelSwarmStreamsFailing", FAILED, 67, 71, MODEL
    ),
    "streams fail, and counters restart": Fault(
        "ModelSwarmStreamsFailing",
        FAILED
        | vary(
            "0+0x59 1+1x5 0+1x113", f"{GATEWAY}_streams_total", "outcome=failed", "pod=gateway-1"
        ),
        67,
        72,
        MODEL,
    ),
    "a gateway refuses requests": Fault(
        "ModelSwarmRequestsRefused",
        vary(counting_from(60, 3), f"{GATEWAY}_requests_total", "code=429", "pod=gateway-0"),
        77,
        78,
        MODEL,
    ),
    "no standby leads": Fault("ModelSwarmNoOperatorLeader", end("pod=operator-0"), 64, 120, HERE),
    "the leader leaves, then its standby": Fault(
        "ModelSwarmNoOperatorLeader",
        end("pod=operator-0") | end("pod=operator-1", at=62),
        64,
        65,
        HERE,
    ),
    "a new operator lacks permissions": Fault(
        "ModelSwarmPermissionsMissing",
        vary(change(0, 2), f"{OPERATOR}_missing_permissions", "pod=operator-1"),
        69,
        70,
        HERE,
    ),
    "lists fail": Fault(
        "ModelSwarmListsFailing",
        vary(
            f"0+60x60 3600+0x{MINUTES}",
            f"{OPERATOR}_last_resync_timestamp_seconds",
            "pod=operator-0",
        ),
        82,
        83,
        HERE,
    ),
    "a swarm is degraded": Fault("ModelSwarmDegraded", DEGRADED, 74, 75, HERE),
    "a device is full again and again": Fault(
        "ModelSwarmDeviceOutOfMemory",
        vary(
            "0+0x59 1+1x1 0+0x1 1+0x120", f"{SERVER}_out_of_memory_steps_total", "pod=m-s0-1"
        ),
        64,
        69,
        {"namespace": "team-a", "model": "m"},
    ),
    "a server restarts before it has run a step": Fault(
        "ModelSwarmProcessRestarting",
        vary(starting(60, 70, 80), "process_start_time_seconds", "pod=m-s0-1"),
        84,
        85,
        {"namespace": "team-a", "pod": "m-s0-1"},
    ),
    "a gateway restarts": Fault(
        "ModelSwarmProcessRestarting",
        vary(starting(60, 70, 80), "process_start_time_seconds", "pod=gateway-0")
        | vary("1+0x79 stale _x4 1+0x95", f"{GATEWAY}_build_info", "pod=gateway-0"),
        84,
        85,
        {"namespace": "ai", "pod": "gateway-0"},
    ),
    "an operator restarts": Fault(
        "ModelSwarmProcessRestarting",
        vary(starting(60, 70, 80), "process_start_time_seconds", "pod=operator-1"),
        84,
        85,
        {"namespace": "ai", "pod": "operator-1"},
    ),
}  # fmt: skip

HEALTHY: dict[str, Series] = {
    "nothing happens": {},
    "a model is suspended": FORGOTTEN | SERVERS_GONE | UNREADY,
    "a model is deleted": FORGOTTEN
    | SERVERS_GONE
    | vary(change(1, 0), SWARMS, "condition=Ready", "status=True", "pod=operator-0"),
    "a model starts slowly for the first time": vary(change(0, 1), READY)
    | vary(change(1, 0), SWARMS, "condition=Ready", "status=False", "pod=operator-0")
    | PROGRESSING,
    "a model starts slowly while another one is degraded": vary(change(0, 1), READY)
    | vary(change(1, 0), SWARMS, "condition=Ready", "status=False", "pod=operator-0")
    | PROGRESSING
    | vary(change(1, 0, at=14), SWARMS, "condition=Degraded", "pod=operator-0"),
    "a span is lost for some minutes": vary(change(1, 0, until=64), READY)
    | vary(change(0, 1, until=64), SWARMS, "condition=Degraded", "pod=operator-0"),
    "the standby takes over": vary(change(1, 0), f"{OPERATOR}_leader", "pod=operator-0")
    | vary(change(0, 1, at=61), f"{OPERATOR}_leader", "pod=operator-1")
    | vary(f"0+60x60 0+0x{MINUTES}", f"{OPERATOR}_last_resync_timestamp_seconds", "pod=operator-0")
    | vary(f"0+0x61 3720+60x{MINUTES}", f"{OPERATOR}_last_resync_timestamp_seconds", "pod=operator-1")
    | vary(starting(60), "process_start_time_seconds", "pod=operator-0"),
    "every pod is replaced": end("pod=gateway-0")
    | end("pod=gateway-1", at=61)
    | end("pod=operator-1")
    | end("pod=m-s0-1")
    | later(60, gateway("gateway-2", "ai", "m"))
    | later(61, gateway("gateway-3", "ai", "m"))
    | later(61, operator("operator-2", "ai", leads=False))
    | later(62, server("m-s0-2", "team-a", "m")),
    "counters of many failures restart": vary(
        f"900+0x59 0+0x{MINUTES}", f"{GATEWAY}_streams_total", "outcome=failed"
    )
    | vary(f"900+0x59 0+0x{MINUTES}", f"{GATEWAY}_requests_total", "code=429")
    | vary(f"900+0x59 0+0x{MINUTES}", f"{SERVER}_out_of_memory_steps_total"),
    "few of few streams fail": vary(steady(0), f"{GATEWAY}_streams_total", "outcome=completed")
    | vary(change(0, 2), f"{GATEWAY}_streams_total", "outcome=failed"),
    "few of few requests are refused": vary(steady(0), f"{GATEWAY}_requests_total", "code=200")
    | vary(counting(0.2), f"{GATEWAY}_requests_total", "code=429"),
    "a small share of many fails": vary(counting(300), f"{GATEWAY}_streams_total", "outcome=completed")
    | vary(counting(1), f"{GATEWAY}_streams_total", "outcome=failed")
    | vary(counting(300), f"{GATEWAY}_requests_total", "code=200")
    | vary(counting(1), f"{GATEWAY}_requests_total", "code=429"),
    "two steps find a device full": vary(change(0, 2), f"{SERVER}_out_of_memory_steps_total", "pod=m-s0-1"),
    "a process restarts twice": vary(starting(60, 70), "process_start_time_seconds"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_alert_fires_on_its_fault_alone(fault: str, tmp_path: Path) -> None:
    made = FAULTS[fault]
    series = HEALTH | OTHER_INSTALLATION | made.series
    expected = {made.silent_at: [], made.firing_at: [made.expected]}
    assert not objections(series, expected, tmp_path)


@pytest.mark.parametrize("scene", HEALTHY)
def test_no_alert_fires_in_health(scene: str, tmp_path: Path) -> None:
    series = HEALTH | OTHER_INSTALLATION | HEALTHY[scene]
    assert not objections(series, {MINUTES: []}, tmp_path)


def test_every_alert_has_a_fault_a_severity_and_a_row() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert set(names) == {fault.alert for fault in FAULTS.values()}
    section = PAGE.read_text().split("## Alerts")[1]
    assert re.findall(r"^\| `(ModelSwarm\w+)` \| (\w+) \|", section, re.MULTILINE) == [
        (rule["alert"], rule["labels"]["severity"]) for rule in alerts()
    ]
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["for"]
        assert rule["annotations"].keys() == {"summary", "description"}


def test_annotations_use_only_labels_of_their_alert() -> None:
    for rule in alerts():
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        [known] = {frozenset(f.labels) for f in FAULTS.values() if f.alert == rule["alert"]}
        assert used and used <= known, rule["alert"]


async def test_rules_select_only_exported_metrics_and_labels() -> None:
    known = await collect_metrics()
    for rule in alerts():
        names = NAME.findall(rule["expr"])
        assert names and not set(names) - known.keys(), rule["alert"]
        assert not unknown_labels(rule["expr"], known), rule["alert"]
        selected = [name for name, _ in SELECTOR.findall(rule["expr"])]
        assert selected == names, f"{rule['alert']}: a metric of all installations"


async def test_rules_select_only_values_that_exist() -> None:
    known = await collect_metrics()
    for rule in alerts():
        for name, inside in SELECTOR.findall(rule["expr"]):
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', inside):
                exported = {sample.labels.get(label) for sample in known[name].samples}
                assert label == "namespace" or set(values.split("|")) <= exported, (name, label)


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    written = tmp_path / "rules.yaml"
    written.write_text(fill(RULES.read_text(), servers=".+", resync="1e+06"))
    assert promtool_fault("check", "rules", str(written)) == ""
