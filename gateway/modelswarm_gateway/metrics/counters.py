"""Prometheus counters and histograms of the gateway.

The service, its generations and the node count here; the present state is in `collectors.py`. Every label has few
values: models are those known here, any other name is "other". docs/metrics.md lists all names.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from modelswarm.protocol.messages import FaultKind, Finish
from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.backend.recovery_events import RecoveryResult
from modelswarm_gateway.core.interface.views import SessionView
from modelswarm_gateway.core.migration.migration import MigrationOutcome
from modelswarm_gateway.errors import TABLE
from modelswarm_gateway.metrics.collectors import PREFIX, SwarmCollector
from modelswarm_gateway.metrics.vllm import VllmCollector

# A stream may be held for the hold limit, 5 minutes by default; a histogram answers no quantile behind its last bound.
_HELD = (60, 120, 300, 600)
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, *_HELD)
NEXT_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.15,
    0.3,
    0.6,
    1.2,
    2.5,
    5,
    15,
    *_HELD,
)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)
# A request may wait for the lease of a lost gateway: 30 s by default, and at most a minute.
QUEUE_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    *_HELD[:2],
)
RECOVERY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 4, 8, 16, 32, *_HELD)
HOP_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
OTHER_MODEL = "other"
# Forgotten models whose series are removed at a time. Among the series of 200 models those of one take 7 ms, in which
# no stream gets a token.
REMOVED_AT_A_TIME = 4
REROUTE_CAUSES = (
    *(kind.value for kind in FaultKind if kind is not FaultKind.NO_TOKEN),
    "silent",
    "overdue",
    "late",
)
EJECTION_CAUSES = ("silent", "overdue", "failed", "slow")
MIGRATION_CAUSES = ("drain", "shutdown", "slow", "rebalance")
STATUSES = sorted({200, *(mapping.status for mapping in TABLE.values())})


class TurnOutcome(enum.Enum):
    """End of a turn that was started."""

    COMPLETED = "completed"
    RECOVERED = "recovered"  # completed after at least one fault
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the client
    REFUSED = "refused"  # before its first token, for lack of room or servers


@dataclass(frozen=True, slots=True)
class _Series:
    """Series of one model. Looked up once, because some are counted for every token."""

    prompt: Counter
    generated: Counter
    reused: Counter
    replayed: Counter
    wait: Histogram
    prefill: Histogram
    first: Histogram
    following: Histogram
    decode: Histogram
    whole: Histogram
    hops: Histogram


class TurnMeter:
    """Measures one turn, in times of the service's clock."""

    __slots__ = (
        "_first_token_at",
        "_last_token_at",
        "_prompt",
        "_requested_at",
        "_series",
        "_started_at",
    )

    def __init__(self, series: _Series, prompt: int, asked: float) -> None:
        self._series, self._prompt, self._requested_at = series, prompt, asked
        self._started_at = self._last_token_at = asked
        self._first_token_at: float | None = None

    def on_started(self, now: float) -> None:
        """Record that the turn was handed to the swarm."""
        self._started_at = now
        self._series.wait.observe(now - self._requested_at)

    def on_tokens(self, count: int, now: float) -> None:
        """Record `count` tokens that arrived together."""
        series = self._series
        series.generated.inc(count)
        if self._first_token_at is None:
            self._first_token_at = now
            series.first.observe(now - self._requested_at)
            series.prefill.observe(now - self._started_at)
        else:
            pause = (now - self._last_token_at) / count
            for _ in range(count):
                series.following.observe(pause)
        self._last_token_at = now

    def on_ended(self, outcome: TurnOutcome, session: SessionView | None, now: float) -> None:
        """Record the end of the turn. `session`: its state at the end; None if the core has lost it."""
        series = self._series
        if outcome in (TurnOutcome.COMPLETED, TurnOutcome.RECOVERED):
            series.whole.observe(now - self._requested_at)
            if self._first_token_at is not None:
                series.decode.observe(self._last_token_at - self._first_token_at)
        if session is not None and session.route:
            series.hops.observe(len(session.route))
            series.reused.inc(min(session.reused, self._prompt))
            series.replayed.inc(session.replayed)


class Metrics:
    def __init__(self, backend: SessionBackend, *, vllm_names: bool = False) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = own = CollectorRegistry()
        self._backend = backend
        gauges = SwarmCollector(backend, self._keep_models)
        own.register(gauges)  # first: series of the models that it sees are created at zero
        self._series_of: dict[str, _Series] = {}
        self._metrics: list[Counter | Histogram] = []  # all, by model
        self._make_counters()
        self._make_histograms()
        ProcessCollector(registry=own)
        for status in STATUSES:
            self._requests.labels(OTHER_MODEL, str(status))
        if vllm_names:
            own.register(VllmCollector((gauges, *self._sources())))

    def _make_counters(self) -> None:
        def count(name: str, description: str, *labels: str) -> Counter:
            made = Counter(PREFIX + name, description, labels, registry=self.registry)
            self._metrics.append(made)
            return made

        self._requests = count(
            "requests",
            "Ended requests by HTTP status; 499: the client disconnected.",
            "model",
            "code",
        )
        self._streams = count(
            "streams",
            "Ended turns by outcome; recovered: completed after a fault.",
            "model",
            "outcome",
        )
        self._answers = count(
            "responses", "Answers that ended with a stop or at their length.", "model", "finish"
        )
        self._tokens = count("tokens", "Prompt tokens and generated tokens.", "model", "kind")
        self._reused = count(
            "reused_tokens", "Prompt tokens that a named session still held.", "model"
        )
        self._replayed = count(
            "replayed_tokens", "Tokens that were replayed after a fault.", "model"
        )
        self._reroutes = count("reroutes", "Faults that re-routed a session.", "model", "cause")
        self._recoveries = count(
            "recoveries",
            "Ended recoveries by first cause and outcome.",
            "model",
            "cause",
            "outcome",
        )

        self._ejections = count(
            "ejections", "Ejections of servers from new routes.", "model", "cause"
        )
        self._grammar_changes = count(
            "grammar_version_changes",
            "Sessions with a grammar that went on at a tail with another version of its library.",
            "model",
        )
        self._numerics_changes = count(
            "numerics_changes",
            "Replaced hops that run in another numerics class than before.",
            "model",
        )
        self._migrations = count(
            "migrations",
            "Migrations of sessions off a server by cause and outcome.",
            "model",
            "cause",
            "outcome",
        )

    def _make_histograms(self) -> None:
        def spread(name: str, description: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(
                PREFIX + name, description, ("model",), registry=self.registry, buckets=buckets
            )
            self._metrics.append(made)
            return made

        self._queue = spread(
            "queue_seconds", "Time from a request to its start in the swarm.", QUEUE_BUCKETS
        )
        self._prefill = spread(
            "prefill_seconds",
            "Time from the start in the swarm to the first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._first = spread(
            "time_to_first_token_seconds",
            "Time from a request to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._next = spread(
            "inter_token_seconds", "Time between tokens of one answer.", NEXT_TOKEN_BUCKETS
        )
        self._decode = spread(
            "decode_seconds", "Time from the first token to the last.", REQUEST_BUCKETS
        )
        self._whole = spread(
            "request_seconds", "Time from a request to its answer's end.", REQUEST_BUCKETS
        )
        self._hops = spread("route_hops", "Servers on the route of a turn.", HOP_BUCKETS)
        self._recovery = spread(
            "recovery_seconds", "Time from a fault to the next token.", RECOVERY_BUCKETS
        )

    def _sources(self) -> tuple[Counter | Histogram, ...]:
        """Return the metrics that have a name in vLLM too."""
        return (
            *(self._tokens, self._reused, self._answers, self._streams),
            *(self._queue, self._prefill, self._first, self._next, self._decode, self._whole),
        )

    def count_request(self, model: str, status: int) -> None:
        """Count an ended request by its HTTP status."""
        self._requests.labels(self._label(model), str(status)).inc()

    def meter_turn(self, model: str, prompt: int, asked: float) -> TurnMeter:
        """Return a meter for a turn, and count its `prompt` tokens; 0 for a further answer to the same prompt."""
        series = self._series(self._label(model))
        series.prompt.inc(prompt)
        return TurnMeter(series, prompt, asked)

    def count_turn(self, model: str, outcome: TurnOutcome, finish: str | None) -> None:
        label = self._label(model)
        self._streams.labels(label, outcome.value).inc()
        if finish is not None:
            self._answers.labels(label, finish).inc()

    def on_rerouted(self, model: str, cause: str) -> None:
        self._reroutes.labels(self._label(model), cause).inc()

    def on_recovered(self, model: str, recovery: RecoveryResult) -> None:
        label = self._label(model)
        self._recoveries.labels(label, recovery.cause, recovery.outcome).inc()
        if recovery.seconds is not None:
            self._recovery.labels(label).observe(recovery.seconds)

    def on_ejected(self, model: str, cause: str) -> None:
        self._ejections.labels(self._label(model), cause).inc()

    def on_grammar_version_changed(self, model: str) -> None:
        self._grammar_changes.labels(self._label(model)).inc()

    def on_numerics_changed(self, model: str) -> None:
        self._numerics_changes.labels(self._label(model)).inc()

    def on_migrated(self, model: str, cause: str, outcome: str) -> None:
        self._migrations.labels(self._label(model), cause, outcome).inc()

    def _label(self, model: str) -> str:
        if self._backend.model_card(model) is None:
            return OTHER_MODEL
        if model not in self._series_of:
            # Here too: where no Prometheus scrapes, nothing else removes them.
            self._remove_others([card.name for card in self._backend.model_cards()])
            self._series(model)
        return model

    def _keep_models(self, models: Collection[str]) -> None:
        """Create the series of the known models, and remove those of others."""
        self._remove_others(models)
        for model in models:
            self._series(model)

    def _remove_others(self, models: Collection[str]) -> None:
        """Remove the series of some models that are not among `models`: each takes 90 KB."""
        others = sorted(self._series_of.keys() - {*models, OTHER_MODEL})
        for gone in others[:REMOVED_AT_A_TIME]:
            del self._series_of[gone]
            for metric in self._metrics:
                metric.remove_by_labels({"model": gone})

    def _series(self, label: str) -> _Series:
        """Return the series of a model; at its first use all its series are created at zero."""
        found = self._series_of.get(label)
        if found is None:
            found = self._series_of[label] = self._make_series(label)
            self._create_series(label)
        return found

    def _make_series(self, label: str) -> _Series:
        return _Series(
            prompt=self._tokens.labels(label, "prompt"),
            generated=self._tokens.labels(label, "generated"),
            reused=self._reused.labels(label),
            replayed=self._replayed.labels(label),
            wait=self._queue.labels(label),
            prefill=self._prefill.labels(label),
            first=self._first.labels(label),
            following=self._next.labels(label),
            decode=self._decode.labels(label),
            whole=self._whole.labels(label),
            hops=self._hops.labels(label),
        )

    def _create_series(self, label: str) -> None:
        """Create all series of a model at zero: a counter that appears with its first event shows no increase."""
        self._grammar_changes.labels(label)
        self._numerics_changes.labels(label)
        for status in STATUSES:
            self._requests.labels(label, str(status))
        for outcome in TurnOutcome:
            self._streams.labels(label, outcome.value)
        for finish in (Finish.STOP, Finish.LENGTH):
            self._answers.labels(label, finish.value)
        for cause in REROUTE_CAUSES:
            self._reroutes.labels(label, cause)
            for ended in RecoveryResult.OUTCOMES:
                self._recoveries.labels(label, cause, ended)
        for cause in EJECTION_CAUSES:
            self._ejections.labels(label, cause)
        for cause in MIGRATION_CAUSES:
            for how in MigrationOutcome:
                self._migrations.labels(label, cause, how.value)
        self._recovery.labels(label)
