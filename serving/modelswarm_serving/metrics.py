"""Metrics of a server for Prometheus; `runtime/probe_server.py` has the port.

Written by `runtime/node.py` on the event loop, read by another thread. The statistics of the core are handed over as
one frozen value and turned into samples when they are scraped. Every sample names the model and the blocks, so that a
query needs no join. docs/metrics.md lists all names. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modelswarm import __version__
from modelswarm.protocol.messages import FaultKind
from modelswarm_serving.core.stats import ServerStats
from modelswarm_serving.model.base import Compute, ModelShape

PREFIX = "modelswarm_server_"
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    def __init__(self, model: str, shape: ModelShape, compute: Compute) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = own = CollectorRegistry()
        labels = {"model": model, "blocks": f"{shape.first}:{shape.last}"}
        names, values = tuple(labels), tuple(labels.values())

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(PREFIX + name, text, names, registry=own, buckets=buckets)
            return made.labels(*values)

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, names, registry=own).labels(*values)

        seconds = "Duration of one step of the model."
        self._step_seconds = histogram("step_seconds", seconds, STEP_BUCKETS)
        self._step_rows = histogram("step_rows", "Rows of one step.", ROW_BUCKETS)
        self._rows = counter("rows", "Rows run through the blocks.")
        self._failed_steps = counter("failed_steps", "Steps that raised an exception.")
        full = "Steps that failed because their device was full; admissions pause after each."
        self._out_of_memory = counter("out_of_memory_steps", full)
        part = "Duration of one part of a forward or backward pass; a row waits for one at most."
        self._part_seconds = histogram("pass_part_seconds", part, STEP_BUCKETS)
        self._passes = counter("passes", "Forward and backward passes that were completed.")
        self._failed_passes = counter("failed_passes", "Passes that raised an exception.")
        self._stats_collector = _StatsCollector(labels, shape, compute)
        own.register(self._stats_collector)
        ProcessCollector(registry=own)

    def observe_step(self, rows: int, seconds: float, failed: bool) -> None:
        if rows:  # no token waits for a step of KV transfers
            self._rows.inc(0 if failed else rows)
            self._step_seconds.observe(seconds)
            self._step_rows.observe(rows)
        if failed:
            self._failed_steps.inc()

    def observe_part(self, seconds: float, result: bytes | str | None) -> None:
        """Count a part of a pass, and the pass if it ended: with its result, or with a failure as text."""
        self._part_seconds.observe(seconds)
        if isinstance(result, str):
            self._failed_passes.inc()
        elif result is not None:
            self._passes.inc()

    def count_out_of_memory(self) -> None:
        self._out_of_memory.inc()

    def set_stats(self, stats: ServerStats) -> None:
        """Hand over the current statistics."""
        self._stats_collector.stats = stats


class _StatsCollector(Collector):
    """Turns the newest statistics of the core into samples."""

    def __init__(self, labels: Mapping[str, str], shape: ModelShape, compute: Compute) -> None:
        self._labels, self._shape, self._compute = labels, shape, compute
        self.stats: ServerStats | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield self._gauges_by(
            "build_info", "Version of the running server.", "version", {__version__: 1}
        )
        page = self._shape.page_size
        yield self._gauge("kv_page_tokens", "Positions of KV in one page.", page)
        how = self._compute
        text = "Device, number format, numerics class, layout of the weights and attention of the steps."
        names = ("device", "dtype", "numerics", "layout", "attention", "decode_graphs")
        labels = [*self._labels, *names]
        family = GaugeMetricFamily(PREFIX + "compute_info", text, labels=labels)
        graphs = "true" if how.decode_graphs else "false"
        values = (how.device, how.dtype, how.numerics, how.layout, how.attention, graphs)
        family.add_metric([*self._labels.values(), *values], 1.0)
        yield family
        yield self._layouts()
        yield self._gauge("threads", "CPU threads that compute a step.", self._compute.threads)
        stats = self.stats
        if stats is not None:
            yield from self._memory(stats)
            yield from self._sessions(stats)
            yield self._reports(stats)

    def _layouts(self) -> Metric:
        text = "Seconds of products with a part of the weights, as measured at start."
        labels = [*self._labels, "layout", "rows"]
        family = GaugeMetricFamily(PREFIX + "weight_product_seconds", text, labels=labels)
        for layout, found in self._compute.layout_seconds.items():
            for rows, seconds in found.items():
                family.add_metric([*self._labels.values(), layout, str(rows)], seconds)
        return family

    def _memory(self, stats: ServerStats) -> Iterable[Metric]:
        empty = stats.total_pages - stats.free_pages - stats.filled_pages
        pages = {"used": stats.filled_pages, "reserved": empty, "free": stats.free_pages}
        text = "KV pages by state; reserved: allocated to a session, still empty."
        yield self._gauges_by("kv_pages", text, "state", pages)
        text = "KV pages that only recoveries may take."
        yield self._gauge("kv_recovery_pages", text, stats.recovery_pages)
        yield self._gauge("replay_bytes", "Memory of the replay log.", stats.replay_bytes)
        text = "Memory that the replay log may take."
        yield self._gauge("replay_limit_bytes", text, stats.replay_limit)
        text = "Sessions whose rows the replay log evicted because memory was short."
        family = CounterMetricFamily(PREFIX + "replay_evictions", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), stats.replay_evictions)
        yield family

    def _sessions(self, stats: ServerStats) -> Iterable[Metric]:
        sessions = {"running": stats.running, "idle": stats.sessions - stats.running}
        yield self._gauges_by("sessions", "Sessions with state on this server.", "state", sessions)
        yield self._gauge("waiting_sessions", "Sessions whose rows wait for a step.", stats.ready)
        oldest = stats.oldest_ready_seconds
        yield self._gauge("oldest_wait_seconds", "Age of the oldest waiting rows.", oldest)
        links = {"gateway": stats.gateways, "server": stats.servers}
        yield self._gauges_by("links", "Linked processes.", "role", links)
        yield self._gauge("draining", "1 while the server drains before it stops.", stats.draining)

    def _reports(self, stats: ServerStats) -> Metric:
        names = [*self._labels, "kind"]
        family = CounterMetricFamily(
            PREFIX + "fault_reports", "Faults reported to gateways.", labels=names
        )
        for kind in FaultKind:
            values = [*self._labels.values(), kind.value]
            family.add_metric(values, stats.reports.get(kind, 0))
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), float(value))
        return family

    def _gauges_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=[*self._labels, label])
        for label_value, value in values.items():
            family.add_metric([*self._labels.values(), label_value], float(value))
        return family
