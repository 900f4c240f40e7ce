"""Names, labels and initial values of the metrics of the three processes, and the page about them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.samples import Sample
from support.kubernetes.prometheus import lint
from typing_extensions import override

from modelswarm.protocol.identity import Adapter
from modelswarm.protocol.messages import Heartbeat
from modelswarm.resources.spec import Sessions, parse_duration
from modelswarm_gateway.backend.recovery_events import RecoveryEvents
from modelswarm_gateway.backend.token_stream import TokenStream
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.discovery.file_source import FileSource
from modelswarm_gateway.errors import TABLE
from modelswarm_gateway.generation.session_locator import WAIT_SECONDS
from modelswarm_gateway.metrics.counters import (
    EJECTION_CAUSES,
    FIRST_TOKEN_BUCKETS,
    MIGRATION_CAUSES,
    NEXT_TOKEN_BUCKETS,
    QUEUE_BUCKETS,
    RECOVERY_BUCKETS,
    REMOVED_AT_A_TIME,
    REROUTE_CAUSES,
    Metrics,
    TurnOutcome,
)
from modelswarm_gateway.models.registry import FORGET_SECONDS
from modelswarm_gateway.runtime.node import Node
from modelswarm_operator.observability.metrics import Metrics as OperatorMetrics
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import PodView
from modelswarm_serving.metrics import Metrics as ServerMetrics
from modelswarm_serving.model.base import Compute, ModelShape
from tools.dashboard.metric_registries import (
    BLOCKS,
    MODEL,
    exposed_name,
    gateway_registry,
    make_hello,
    make_node,
    metric_families,
    operator_registry,
    server_registry,
)
from tools.dashboard.rows import variables
from tools.make_metrics_page import PAGE, replace_tables

CAUSES = {
    "reroutes": REROUTE_CAUSES,
    "ejections": EJECTION_CAUSES,
    "migrations": MIGRATION_CAUSES,
}
SHAPE = ModelShape(0, 4, BLOCKS, 8, 16, 10, 64, 256)
UNITS = ("_seconds", "_bytes", "_ratio", "_info")


def read_value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def samples_of(registry: CollectorRegistry, name: str) -> list[Sample]:
    """Return the samples of a counter of the gateway."""
    family = f"modelswarm_gateway_{name}"
    return [s for found in registry.collect() if found.name == family for s in found.samples]


async def make_registries() -> dict[str, CollectorRegistry]:
    return {
        "gateway": await gateway_registry(),
        "server": server_registry(),
        "operator": operator_registry(),
    }


def test_metrics_page_is_the_generated_one() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_tables(text), "run python tools/make_metrics_page.py"


@pytest.mark.parametrize("process", ["gateway", "server", "operator"])
async def test_promtool_lint_finds_nothing(process: str) -> None:
    assert not lint(generate_latest((await make_registries())[process]))


@pytest.mark.parametrize("process", ["gateway", "server", "operator"])
async def test_names_start_with_the_process_and_omit_created_times(process: str) -> None:
    shown = metric_families((await make_registries())[process])
    families = [f for f in shown if not f.name.startswith(("process_", "python_"))]
    assert len(families) > 10
    assert all(f.name.startswith(f"modelswarm_{process}_") for f in families)
    assert all(f.documentation.endswith(".") for f in families)
    assert not [s.name for f in shown for s in f.samples if s.name.endswith("_created")]


async def test_new_model_starts_with_zero_counters() -> None:
    registry = await gateway_registry()
    for outcome in TurnOutcome:
        name = "modelswarm_gateway_streams_total"
        assert read_value(registry, name, model=MODEL, outcome=outcome.value) == 0
    for name, causes in CAUSES.items():
        for cause in causes:
            labels = {"model": MODEL, "cause": cause}
            values = [
                s.value for s in samples_of(registry, name) if labels.items() <= s.labels.items()
            ]
            assert values and not any(values), (name, cause)
    assert read_value(registry, "modelswarm_gateway_recovery_seconds_count", model=MODEL) == 0


async def test_every_status_of_requests_starts_at_zero() -> None:
    registry = await gateway_registry()
    statuses = {200, *(mapping.status for mapping in TABLE.values())}
    for model, status in product((MODEL, "other"), statuses):
        labels = {"model": model, "code": str(status)}
        assert read_value(registry, "modelswarm_gateway_requests_total", **labels) == 0, labels


def test_counters_of_the_operator_start_at_zero() -> None:
    metrics = OperatorMetrics()

    def read_counter(name: str, **labels: str) -> float | None:
        return read_value(metrics.registry, f"modelswarm_operator_{name}_total", **labels)

    for kind in ("pods", "services", "poddisruptionbudgets"):
        assert read_counter("rejected_writes", resource=kind) == 0
        assert read_counter("watch_events", resource=kind, type="DELETED") == 0
    metrics.record_api_call("GET", "/api/v1/pods", 200, 0.01)
    for code in ("none", "403", "409", "429", "500", "503"):
        assert read_counter("api_requests", verb="GET", resource="pods", code=code) == 0


class ExpectingSource(FileSource):
    """Expects a model of which no server was seen yet, until it is told of others."""

    expected = frozenset({MODEL})

    @override
    def expected_models(self) -> frozenset[str]:  # type: ignore[override]
        return self.expected


async def test_unknown_numbers_of_a_model_are_absent() -> None:
    source = ExpectingSource(Path("there-is-no-such-folder"))
    node = Node("gateway/1/x", 1, source, GatewaySettings(), lambda: 0.0, lambda: 0.0)
    node.discover_servers()
    registry = Metrics(node).registry
    assert read_value(registry, "modelswarm_gateway_coverage", model=MODEL) == 0
    assert read_value(registry, "modelswarm_gateway_uncovered_blocks", model=MODEL) is None
    assert read_value(registry, "modelswarm_gateway_min_health_score", model=MODEL) is None
    node.on_link_up("s0/1/x", make_hello("s0", 0, 4))
    assert read_value(registry, "modelswarm_gateway_uncovered_blocks", model=MODEL) == BLOCKS - 4
    assert read_value(registry, "modelswarm_gateway_min_health_score", model=MODEL) == 1.0


async def test_forgotten_model_leaves_no_series() -> None:
    """In a cluster models come and go: each had 226 lines and 90 KB for as long as its gateway ran."""
    source, now = ExpectingSource(Path("there-is-no-such-folder")), 0.0
    node = Node("gateway/1/x", 1, source, GatewaySettings(), lambda: now, lambda: 0.0)
    metrics = Metrics(node)
    node.discover_servers()
    metrics.count_request(MODEL, 200)
    assert f'"{MODEL}"' in generate_latest(metrics.registry).decode()
    source.expected = frozenset()
    node.discover_servers()
    now = 2 * FORGET_SECONDS
    node.discover_servers()
    assert f'"{MODEL}"' not in generate_latest(metrics.registry).decode()
    metrics.count_request(MODEL, 404)
    assert f'"{MODEL}"' not in generate_latest(metrics.registry).decode()


async def test_series_of_gone_models_go_without_a_scrape() -> None:
    """A cluster may have no Prometheus; then the next model's first request removes them."""
    source, now = ExpectingSource(Path("there-is-no-such-folder")), 0.0
    node = Node("gateway/1/x", 1, source, GatewaySettings(), lambda: now, lambda: 0.0)
    metrics = Metrics(node)
    for number in range(4):
        source.expected = frozenset({f"m{number}"})
        node.discover_servers()
        metrics.count_request(f"m{number}", 200)
        source.expected = frozenset()
        node.discover_servers()
        now += 2 * FORGET_SECONDS
        node.discover_servers()
    assert set(metrics._series_of) == {"m3"}


async def test_series_of_many_gone_models_go_a_few_at_a_time() -> None:
    """All of 200 deleted swarms at once took 1.4 s of the event loop, and an eighth of them 0.2 s."""
    source, now, count = ExpectingSource(Path("there-is-no-such-folder")), 0.0, 48
    source.expected = frozenset(f"m{number}" for number in range(count))
    node = Node("gateway/1/x", 1, source, GatewaySettings(), lambda: now, lambda: 0.0)
    node.discover_servers()
    metrics, left = Metrics(node), []
    generate_latest(metrics.registry)
    source.expected = frozenset()
    node.discover_servers()
    now = 2 * FORGET_SECONDS
    node.discover_servers()
    for _ in range(2):
        generate_latest(metrics.registry)
        left.append(len(metrics._series_of))
    assert left == [count - REMOVED_AT_A_TIME, count - 2 * REMOVED_AT_A_TIME]


async def test_dashboard_can_choose_an_adapter() -> None:
    node = make_node()
    registry = Metrics(node).registry
    hello = replace(make_hello("s0", 0, BLOCKS), adapters=(Adapter("tuned", "1" * 16),))
    node.on_link_up("s0/1/x", hello)
    chosen = next(each for each in variables() if each["name"] == "model")["definition"]
    [name] = re.findall(r"label_values\((\w+)", chosen)
    families = {family.name: family for family in registry.collect()}
    assert {s.labels["model"] for s in families[name].samples} == {MODEL, "tuned"}


async def test_recovery_without_a_reported_fault_is_a_reroute() -> None:
    """A hop of a parked session is found dead when its next turn begins."""
    metrics, events = Metrics(make_node()), RecoveryEvents()
    events.observer = metrics
    stream = TokenStream(lambda end: None, lambda length: None)
    events.record_resumption("session", stream, 0.5)
    labels = {"model": "other", "cause": "silent"}
    assert read_value(metrics.registry, "modelswarm_gateway_reroutes_total", **labels) == 1
    assert stream.reroutes == 1
    events.record_reroute("session", stream, "silent")
    events.record_resumption("session", stream, 0.5)
    assert read_value(metrics.registry, "modelswarm_gateway_reroutes_total", **labels) == 2


@pytest.mark.parametrize("name", CAUSES)
def test_metrics_page_explains_exactly_the_causes(name: str) -> None:
    _, _, text = PAGE.read_text(encoding="utf-8").partition(f"- `{name}_total{{cause")
    explained = text.partition("\n- ")[0].partition("Outcomes")[0]
    assert set(re.findall(r"`(\w+)`", explained)) == set(CAUSES[name])


async def test_gauges_show_servers_coverage_and_fullest_blocks() -> None:
    node = make_node()
    registry = Metrics(node).registry
    spans = {"s0": (0, 4), "s1": (0, 4), "s2": (4, 8), "s3": (0, 3)}
    for name, (first, last) in spans.items():
        model = "other-model" if name == "s3" else MODEL
        node.on_link_up(f"{name}/1/x", make_hello(name, first, last, model))
    node.on_items("s0/1/x", [Heartbeat(free_pages=10, total_pages=10)])
    node.on_items("s1/1/x", [Heartbeat(free_pages=0, total_pages=10, draining=True)])
    node.on_items("s2/1/x", [Heartbeat(free_pages=3, total_pages=10)])

    def read_metric(name: str, **labels: str) -> float | None:
        return read_value(registry, f"modelswarm_gateway_{name}", **{"model": MODEL, **labels})

    assert read_metric("servers") == 3
    assert read_metric("draining_servers") == 1
    assert read_metric("coverage") == 1
    assert read_metric("block_servers", block="003") == 2
    assert read_metric("block_servers", block=f"{BLOCKS - 1:03}") == 1
    assert read_metric("kv_usage_ratio") == pytest.approx(0.7)
    assert read_metric("uncovered_blocks") == 0
    assert read_metric("coverage", model="other-model") == 0
    assert read_metric("uncovered_blocks", model="other-model") == 5
    node.on_link_down("s2/1/x", "gone")
    assert (read_metric("coverage"), read_metric("uncovered_blocks"), read_metric("servers")) == (
        0,
        4,
        2,
    )


async def test_unknown_models_add_no_series() -> None:
    node = make_node()
    metrics = Metrics(node)
    node.on_link_up("s0/1/x", make_hello("s0", 0, BLOCKS))
    metrics.count_request("not-here-0", 404)
    before = len(generate_latest(metrics.registry).splitlines())
    for number in range(100):
        metrics.count_request(f"not-here-{number}", 404)
    assert len(generate_latest(metrics.registry).splitlines()) == before
    name = "modelswarm_gateway_requests_total"
    assert read_value(metrics.registry, name, model="other", code="404") == 101


async def test_vllm_metrics_are_optional_and_equal_our_numbers() -> None:
    assert not [f for f in metric_families(await gateway_registry()) if f.name.startswith("vllm:")]
    node = make_node()
    metrics = Metrics(node, vllm_names=True)
    node.on_link_up("s0/1/x", make_hello("s0", 0, BLOCKS))
    node.on_items("s0/1/x", [Heartbeat(free_pages=2, total_pages=10)])
    turn = metrics.meter_turn(MODEL, 5, 0.0)
    turn.on_started(0.5)
    turn.on_tokens(1, 2.0)
    turn.on_tokens(3, 5.0)
    turn.on_ended(TurnOutcome.COMPLETED, None, 6.0)
    metrics.count_turn(MODEL, TurnOutcome.COMPLETED, "stop")
    metrics.count_turn(MODEL, TurnOutcome.CANCELLED, None)

    def read_metric(name: str, **labels: str) -> float | None:
        return read_value(metrics.registry, f"vllm:{name}", model_name=MODEL, **labels)

    assert read_metric("kv_cache_usage_perc") == pytest.approx(0.8)
    assert (read_metric("num_requests_running"), read_metric("num_requests_waiting")) == (0, 0)
    assert (read_metric("prompt_tokens_total"), read_metric("generation_tokens_total")) == (5, 4)
    assert (read_metric("prefix_cache_queries_total"), read_metric("prefix_cache_hits_total")) == (
        5,
        0,
    )
    assert read_metric("request_success_total", finished_reason="stop") == 1
    assert read_metric("request_success_total", finished_reason="abort") == 1
    assert read_metric("time_to_first_token_seconds_sum") == 2.0
    assert read_metric("time_to_first_token_seconds_bucket", le="3.0") == 1
    sums = {"inter_token_latency": 3.0, "e2e_request_latency": 6.0, "request_queue_time": 0.5,
            "request_prefill_time": 1.5, "request_decode_time": 3.0}  # fmt: skip
    for name, total in sums.items():
        assert read_metric(f"{name}_seconds_sum") == pytest.approx(total)
    assert read_metric("inter_token_latency_seconds_count") == 3


async def test_units_are_base_units_and_only_counters_end_in_total() -> None:
    for registry in (await make_registries()).values():
        for family in metric_families(registry):
            name = exposed_name(family)
            assert name.endswith("_total") == (family.type == "counter"), name
            assert "milli" not in name and "_ms" not in name and "percent" not in name
            if family.type == "histogram":
                assert name.endswith((*UNITS, "_rows", "_hops")), name


def test_bounds_of_pauses_go_beyond_the_default_hold_limit() -> None:
    """A quantile behind the last bound would be that bound."""
    limit = parse_duration(Sessions().hold_limit)
    assert max(NEXT_TOKEN_BUCKETS) > limit
    assert max(RECOVERY_BUCKETS) > limit
    assert max(FIRST_TOKEN_BUCKETS) > limit
    assert max(QUEUE_BUCKETS) > WAIT_SECONDS


def test_rows_of_a_failed_step_do_not_count_as_run() -> None:
    """Sessions of such a step run again one by one."""
    metrics = ServerMetrics(MODEL, SHAPE, Compute())
    metrics.observe_step(3, 0.1, True)
    metrics.observe_step(2, 0.1, False)
    labels = {"model": MODEL, "blocks": f"{SHAPE.first}:{SHAPE.last}"}
    assert read_value(metrics.registry, "modelswarm_server_rows_total", **labels) == 2
    assert read_value(metrics.registry, "modelswarm_server_failed_steps_total", **labels) == 1


def test_operator_counts_server_pods_only() -> None:
    metrics = OperatorMetrics()
    roles = (names.SERVER, names.INSPECT, names.KEPT)
    metrics.count_pods(
        PodView(role, role, 0.0, {names.ROLE: role}, {}, "Succeeded") for role in roles
    )
    assert read_value(metrics.registry, "modelswarm_operator_pods", state="failed") == 1
