"""What a gateway in a cluster knows of pods, for Prometheus. Registered by `main.py`; reads, counts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modelswarm_gateway.metrics.collectors import PREFIX

STATES = ("Pending", "Running", "Succeeded", "Failed", "Unknown", "Terminating")


class Pods(Protocol):
    """`Cluster`, as far as it is used here."""

    def pods(self) -> Mapping[str, int]: ...

    @property
    def failures(self) -> int: ...

    @property
    def deaf(self) -> bool: ...


class PodGauges(Collector):
    def __init__(self, cluster: Pods) -> None:
        self._cluster = cluster

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        known = self._cluster.pods()
        pods = GaugeMetricFamily(
            PREFIX + "pods", "Server pods known here by state.", labels=["state"]
        )
        for state in STATES:
            pods.add_metric([state.lower()], known.get(state, 0))
        yield pods
        yield CounterMetricFamily(
            PREFIX + "api_failures", "Failed requests to the API server.", self._cluster.failures
        )
        yield GaugeMetricFamily(
            PREFIX + "pod_watch_up",
            "1 while changes to pods are heard of; at 0 what is known stays.",
            not self._cluster.deaf,
        )
