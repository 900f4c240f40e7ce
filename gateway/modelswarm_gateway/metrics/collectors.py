"""Prometheus collectors for the present state: servers, coverage, sessions, KV; in a cluster also pods.

Read from the backend's views at each scrape, so nothing is counted twice. Registered by `counters.py` and `app.py`;
counts nothing itself.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modelswarm import __version__
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.core.interface.views import ServerView
from modelswarm_gateway.core.sessions.session import SessionState

PREFIX = "modelswarm_gateway_"


class SwarmCollector(Collector):
    def __init__(
        self, backend: SessionBackend, on_models: Callable[[Collection[str]], object]
    ) -> None:
        """`on_models` is called with the names of all known models, at each scrape."""
        self._backend, self._on_models = backend, on_models

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        cards = self._backend.model_cards()
        self._on_models([card.name for card in cards])
        servers: dict[str, list[ServerView]] = {card.name: [] for card in cards}
        for server in self._backend.servers():
            servers.setdefault(server.model, []).append(server)
        yield _gauge(
            "build_info", "Version of the running gateway.", ["version"], [([__version__], 1)]
        )
        # A server has all adapters of its model, and counts once.
        yield from _models([card for card in cards if not card.parent], servers)
        yield from self._sessions(cards)

    def _sessions(self, cards: Sequence[ModelCard]) -> Iterable[Metric]:
        states: Tally[tuple[str, str]] = Tally()
        for card in cards:
            states.update({(card.name, state.value): 0 for state in SessionState})
        entries = Tally({card.name: 0 for card in cards})
        for view in self._backend.sessions():
            states[view.model, view.state] += 1
            entries[view.model] += view.length
        yield _gauge("sessions", "Open sessions by state.", ["model", "state"], states.items())
        yield _gauge("log_tokens", "Entries in the input logs of open sessions.", ["model"],
                     (([model], count) for model, count in entries.items()))  # fmt: skip


def _models(cards: Sequence[ModelCard], servers: dict[str, list[ServerView]]) -> Iterable[Metric]:
    held = {card.name: servers_per_block(card.n_blocks, servers[card.name]) for card in cards}
    per_model = ["model"]
    yield _gauge("model_ready", "1 while requests can be answered.", per_model,
                 (([card.name], card.ready) for card in cards))  # fmt: skip
    yield _gauge("servers", "Linked servers.", per_model,
                 (([card.name], len(servers[card.name])) for card in cards))  # fmt: skip
    yield _gauge("draining_servers", "Linked servers that are being drained.", per_model,
                 (([card.name], sum(map(_is_draining, servers[card.name]))) for card in cards))  # fmt: skip
    yield _gauge("suspected_servers", "Linked servers suspected because of silence.", per_model,
                 (([card.name], sum(view.suspected for view in servers[card.name]))
                  for card in cards))  # fmt: skip
    yield _gauge("ejected_servers", "Linked servers ejected from new routes.", per_model,
                 (([card.name], sum(view.ejected for view in servers[card.name]))
                  for card in cards))  # fmt: skip
    yield _gauge("min_health_score", "Lowest health score of a linked server; the best score is 1.", per_model,
                 (([card.name], min(view.score for view in servers[card.name]))
                  for card in cards if servers[card.name]))  # fmt: skip
    yield _gauge("coverage", "Fewest linked servers of any block, in the variant that has the most.", per_model,
                 (([card.name], lowest_coverage(card.n_blocks, servers[card.name])) for card in cards))  # fmt: skip
    yield _gauge("uncovered_blocks", "Blocks without a server; none before the first server tells their number.",
                 per_model,
                 (([card.name], len(card.missing_blocks)) for card in cards if card.n_blocks))  # fmt: skip
    yield _gauge("block_servers", "Linked servers that hold a block.", ["model", "block"],
                 (([name, f"{block:03}"], count) for name, counts in held.items()
                  for block, count in enumerate(counts)))  # fmt: skip
    yield _gauge("kv_usage_ratio", "Share of KV pages in use on the fullest blocks.", per_model,
                 (([card.name], kv_usage(card, servers[card.name])) for card in cards))  # fmt: skip


def lowest_coverage(blocks: int, servers: Iterable[ServerView]) -> int:
    """Return the fewest servers of any block, in the variant that has the most: no route mixes two variants."""
    variants: dict[object, list[ServerView]] = {}
    for server in servers:
        variants.setdefault(server.variant, []).append(server)
    counts = (servers_per_block(blocks, variant) for variant in variants.values())
    return max((min(each, default=0) for each in counts), default=0)


def servers_per_block(blocks: int, servers: Iterable[ServerView]) -> list[int]:
    """Return for each block the number of servers that hold it."""
    counts = [0] * blocks
    for server in servers:
        for block in range(server.first, min(server.last, blocks)):
            counts[block] += 1
    return counts


def kv_usage(card: ModelCard, servers: Iterable[ServerView]) -> float:
    """Return the share of used pages on the fullest block; a session needs room on every block."""
    free, total = [0] * card.n_blocks, [0] * card.n_blocks
    for server in servers:
        if server.heartbeat is not None:
            for block in range(server.first, min(server.last, card.n_blocks)):
                free[block] += server.heartbeat.free_pages
                total[block] += server.heartbeat.total_pages
    return max((1 - f / t for f, t in zip(free, total, strict=True) if t), default=0.0)


def _is_draining(server: ServerView) -> bool:
    return server.drain_cause != ""


def _gauge(
    name: str,
    description: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, description, labels=labels)
    for found, value in values:
        family.add_metric(found, float(value))
    return family


POD_STATES = ("Pending", "Running", "Succeeded", "Failed", "Unknown", "Terminating")


class PodStates(Protocol):
    """The part of `KubernetesSource` that is used here."""

    def pod_states(self) -> Mapping[str, int]: ...

    @property
    def api_failures(self) -> int: ...

    @property
    def is_watch_down(self) -> bool: ...


class PodCollector(Collector):
    def __init__(self, cluster: PodStates) -> None:
        self._cluster = cluster

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        known = self._cluster.pod_states()
        pods = GaugeMetricFamily(
            PREFIX + "pods", "Server pods by state, as this gateway sees them.", labels=["state"]
        )
        for state in POD_STATES:
            pods.add_metric([state.lower()], known.get(state, 0))
        yield pods
        yield CounterMetricFamily(
            PREFIX + "kube_api_failures",
            "Failed requests to the API server.",
            self._cluster.api_failures,
        )
        yield GaugeMetricFamily(
            PREFIX + "pod_watch_up",
            "1 while changes to pods are received; at 0 the known pods are kept.",
            not self._cluster.is_watch_down,
        )
