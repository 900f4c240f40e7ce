"""The gateway's metrics under vLLM's names, for dashboards, autoscalers and endpoint pickers that expect those.

Registered only with `--vllm-metrics`, so that no tool takes this gateway for vLLM by accident. Renames the metrics of
`counters.py` and `collectors.py` at each scrape; counts nothing. Buckets are those of this gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

OWN, VLLM = "modelswarm_gateway_", "vllm:"


@dataclass(frozen=True, slots=True)
class RenamedMetric:
    """One of vLLM's metrics, made of our samples whose labels match `where`. Of the labels only `model` is kept."""

    ours: str
    theirs: str
    description: str
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)  # our label -> their label
    fixed: Mapping[str, str] = field(default_factory=dict)


PROMPT, GENERATED = {"kind": ["prompt"]}, {"kind": ["generated"]}
ENDED = "Ended answers, and answers that the client cancelled."
NAMES = (
    RenamedMetric("sessions", "num_requests_running", "Sessions that generate.", {"state": ["running"]}),
    RenamedMetric("sessions", "num_requests_waiting", "Sessions that wait for a route.",
            {"state": ["fencing", "held"]}),
    RenamedMetric("kv_usage_ratio", "kv_cache_usage_perc", "Share of KV pages in use; 1: all."),
    RenamedMetric("tokens", "prefix_cache_queries", "Prompt tokens.", PROMPT),
    RenamedMetric("reused_tokens", "prefix_cache_hits", "Prompt tokens that a named session still held."),
    RenamedMetric("tokens", "prompt_tokens", "Prompt tokens.", PROMPT),
    RenamedMetric("tokens", "generation_tokens", "Generated tokens.", GENERATED),
    RenamedMetric("responses", "request_success", ENDED, also={"finish": "finished_reason"}),
    RenamedMetric("streams", "request_success", ENDED, {"outcome": ["cancelled"]},
            fixed={"finished_reason": "abort"}),
    RenamedMetric("time_to_first_token_seconds", "time_to_first_token_seconds", "Time to the first token."),
    RenamedMetric("inter_token_seconds", "inter_token_latency_seconds", "Time between tokens of one answer."),
    RenamedMetric("request_seconds", "e2e_request_latency_seconds", "Time from a request to its answer's end."),
    RenamedMetric("queue_seconds", "request_queue_time_seconds", "Time from a request to its start in the swarm."),
    RenamedMetric("prefill_seconds", "request_prefill_time_seconds", "Time from the start to the first token."),
    RenamedMetric("decode_seconds", "request_decode_time_seconds", "Time from the first token to the last."),
)  # fmt: skip


class VllmCollector(Collector):
    def __init__(self, sources: Iterable[Collector]) -> None:
        self._sources = tuple(sources)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        ours = {family.name: family for source in self._sources for family in source.collect()}
        theirs: dict[str, Metric] = {}
        for renamed in NAMES:
            family = ours[OWN + renamed.ours]
            name = VLLM + renamed.theirs
            made = theirs.setdefault(name, Metric(name, renamed.description, family.type))
            _rename(family, renamed, made)
        return theirs.values()


def _rename(ours: Metric, renamed: RenamedMetric, theirs: Metric) -> None:
    """Add the renamed samples to `theirs`. Samples that get the same labels are summed."""
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in ours.samples:
        labels = sample.labels
        if any(labels[name] not in allowed for name, allowed in renamed.where.items()):
            continue
        kept = {"model_name": labels["model"], **renamed.fixed}
        kept |= {new: labels[old] for old, new in renamed.also.items()}
        if "le" in labels:
            kept["le"] = labels["le"]
        key = (theirs.name + sample.name.removeprefix(ours.name), tuple(kept.items()))
        values[key] = values.get(key, 0.0) + sample.value
    for (name, pairs), value in values.items():
        theirs.add_sample(name, dict(pairs), value)
