"""What Prometheus can ask this gateway, on a port of its own.

The service and the node count into it; gauges are read from the engine when they are asked for. Every label has few
values: models are those that have servers here, anything else is "other".
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modelswarm_gateway.engine import Engine
from modelswarm_gateway.errors import TABLE, Code

PREFIX = "modelswarm_gateway_"
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60)
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
RECOVERY = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 4, 8, 16, 32, 60)
OTHER = "other"


class Meter:
    """Counts the tokens of one turn; its labels are looked up once, because this is done for every token."""

    __slots__ = ("_first", "_generated", "_next")

    def __init__(self, first: Histogram, following: Histogram, generated: Counter) -> None:
        self._first, self._next, self._generated = first, following, generated

    def first_tokens(self, tokens: int, seconds: float) -> None:
        self._first.observe(seconds)
        self._generated.inc(tokens)

    def next_tokens(self, tokens: int, seconds: float) -> None:
        """`tokens` came together, `seconds` after the one before."""
        for _ in range(tokens):
            self._next.observe(seconds / tokens)
        self._generated.inc(tokens)


class Metrics:
    def __init__(self, engine: Engine) -> None:
        self.registry = own = CollectorRegistry()
        self._engine = engine

        def count(name: str, said: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, said, labels, registry=own)

        def spread(name: str, said: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(PREFIX + name, said, labels, registry=own, buckets=buckets)

        self._requests = count(
            "requests", "Ended requests by HTTP status (499: the client left)", "model", "code"
        )
        self._tokens = count("tokens", "Tokens read and generated", "model", "kind")
        self._reroutes = count(
            "reroutes", "Faults that sent a session to look for a route", "cause"
        )
        first, following = "time_to_first_token_seconds", "inter_token_seconds"
        self._first = spread(first, "From a request to its first token", FIRST_TOKEN, "model")
        self._next = spread(following, "Between tokens from the swarm", NEXT_TOKEN, "model")
        self._recovery = spread("recovery_seconds", "From a fault to the next token", RECOVERY)
        self.registry.register(_Views(engine))

    def _label(self, model: str) -> str:
        return model if self._engine.card(model) is not None else OTHER

    def request(self, model: str, code: Code | None) -> None:
        """`code` None: it succeeded."""
        status = 200 if code is None else TABLE[code].status
        self._requests.labels(self._label(model), str(status)).inc()

    def prompt(self, model: str, tokens: int) -> None:
        self._tokens.labels(self._label(model), "prompt").inc(tokens)

    def meter(self, model: str) -> Meter:
        label = self._label(model)
        generated = self._tokens.labels(label, "generated")
        return Meter(self._first.labels(label), self._next.labels(label), generated)

    def rerouted(self, cause: str) -> None:
        self._reroutes.labels(cause).inc()

    def resumed(self, seconds: float) -> None:
        self._recovery.observe(seconds)


class _Views(Collector):
    """Gauges of what the engine shows at this moment."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        cards = self._engine.cards()
        linked = Tally(server.model for server in self._engine.servers())
        servers = GaugeMetricFamily(PREFIX + "servers", "Linked servers", labels=["model"])
        missing = GaugeMetricFamily(
            PREFIX + "uncovered_blocks", "Blocks without a server", labels=["model"]
        )
        for card in cards:
            servers.add_metric([card.name], linked[card.name])
            missing.add_metric([card.name], len(card.missing))
        states = Tally((view.model, view.state) for view in self._engine.sessions())
        sessions = GaugeMetricFamily(
            PREFIX + "sessions", "Open sessions", labels=["model", "state"]
        )
        for (model, state), count in states.items():
            sessions.add_metric([model, state], count)
        return (servers, missing, sessions)
