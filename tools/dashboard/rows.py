"""What the dashboard shows: rows of panels, each with its questions to Prometheus.

Used by `tools/make_dashboard.py`. Names of metrics are those of docs/metrics.md. Gateways each see the whole swarm:
what they count is added up, what they see is taken from the one that sees worst.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.dashboard.operator_rows import OPERATOR_ROWS
from tools.dashboard.parts import Json, Panel, Query, Row
from tools.dashboard.promql import (
    gateway,
    increase,
    mean,
    quantile,
    quantiles,
    rate,
    server,
)

NOW = Row("Now", [
    Panel("Requests", "Requests that end per second, of any status.", "reqps",
          [Query(rate(gateway("requests_total")))], kind="stat", width=4, height=4),
    Panel("Generated", "Tokens generated per second.", "suffix: tok/s",
          [Query(rate(gateway("tokens_total", kind="generated")))], kind="stat", width=4, height=4,
          decimals=1),
    Panel("Sessions that answer", "Sessions in the middle of a turn: running, or looking for a route.",
          "short", [Query(f"sum({gateway('sessions', state='running|fencing|held')})")],
          kind="stat", width=4, height=4),
    Panel("Least coverage", "Fewest servers of any block of any model: at 0 a model stands still, at 1 the "
          "next death makes sessions wait for a replacement.", "short",
          [Query(f"min({gateway('coverage')})")], kind="stat", width=4, height=4, bad_below=1),
    Panel("Streams recovered", "Answers that were completed in spite of a fault, in the time shown.", "short",
          [Query(increase(gateway("streams_total", outcome="recovered"), window="$__range"))],
          kind="stat", width=4, height=4, decimals=0),
    Panel("Streams failed", "Answers that ended with an error, in the time shown.", "short",
          [Query(increase(gateway("streams_total", outcome="failed"), window="$__range"))],
          kind="stat", width=4, height=4, bad_from=1, decimals=0),
])  # fmt: skip

TRAFFIC = Row("Traffic", [
    Panel("Requests by status", "Ended requests per second by HTTP status, of both doors. 429: no room; 499: "
          "the client left; 503: no servers, or stopping.", "reqps",
          [Query(rate(gateway("requests_total"), by="code"), "{{code}}")], stacked=True),
    Panel("Sessions by state", "running: tokens come; fencing: a route is being made; held: waits for a server "
          "or for room; parked: kept between turns.", "short",
          [Query(f"sum by (state) ({gateway('sessions')})", "{{state}}")], stacked=True),
    Panel("Answers by end", "Ended turns per second by how they ended. recovered: completed in spite of a "
          "fault.", "reqps",
          [Query(rate(gateway("streams_total"), by="outcome"), "{{outcome}}")], stacked=True),
])  # fmt: skip

LATENCY = Row("Latency", [
    Panel("Time to first token", "From a request to its first token.", "s",
          quantiles(gateway("time_to_first_token_seconds"))),
    Panel("Between tokens", "Pauses between the tokens of one answer, recoveries included.", "s",
          quantiles(gateway("inter_token_seconds"))),
    Panel("Whole answers", "From a request to its answer's end, of those that ended well.", "s",
          quantiles(gateway("request_seconds"))),
    Panel("Where the first token's time goes", "Mean seconds: wait is tokenising and queueing in the gateway, "
          "prefill is from there to the first token.", "s",
          [Query(mean(gateway("queue_seconds")), "wait"), Query(mean(gateway("prefill_seconds")), "prefill")],
          stacked=True),
    Panel("Route length", "Servers on the route of a turn.", "short", [
        Query(mean(gateway("route_hops")), "mean"),
        Query(quantile(0.99, gateway("route_hops")), "p99"),
    ]),
])  # fmt: skip

TOKENS = Row("Tokens", [
    Panel("Generated tokens", "Per second, by model.", "suffix: tok/s",
          [Query(rate(gateway("tokens_total", kind="generated"), by="model"), "{{model}}")], stacked=True),
    Panel("Prompt tokens", "Per second, by model. Those that a kept session still held were not read again.",
          "suffix: tok/s", [
              Query(rate(gateway("tokens_total", kind="prompt"), by="model"), "{{model}}"),
              Query(rate(gateway("reused_tokens_total"), by="model"), "{{model}}, reused"),
          ]),
    Panel("Tokens read again", "Per second, after faults: what recoveries cost.", "suffix: tok/s",
          [Query(rate(gateway("replayed_tokens_total"), by="model"), "{{model}}")]),
])  # fmt: skip

KV = Row("KV", [
    Panel("Fullest blocks", "Share of KV pages given to sessions, on the blocks with least room. New sessions "
          "are refused when it nears 1 less what is kept for repairs.", "percentunit",
          [Query(f"max by (model) ({gateway('kv_usage_ratio')})", "{{model}}")], most=1, bad_from=0.9),
    Panel("Pages by state", "Of all servers. used: KV lies in them; reserved: given to a session for the "
          "tokens to come; free.", "short",
          [Query(f"sum by (state) ({server('kv_pages')})", "{{state}}")], stacked=True),
    Panel("Pages in use by server", "Share of each server's pages that are given to sessions.", "percentunit", [
        Query(f"1 - sum by (blocks, pod, instance) ({server('kv_pages', state='free')}) / "
              f"sum by (blocks, pod, instance) ({server('kv_pages')})", "{{blocks}} {{pod}} {{instance}}"),
    ], most=1, bad_from=0.9),
    Panel("Kept rows", "Memory of the rows that servers keep, so that a lost successor is rebuilt from them, and "
          "what it may take in all.", "bytes", [
              Query(f"sum by (blocks) ({server('replay_bytes')})", "{{blocks}}"),
              Query(f"sum by (blocks) ({server('replay_limit_bytes')})", "{{blocks}}, limit"),
          ]),
    Panel("Kept rows dropped", "For want of memory: a loss is then rebuilt from further back.", "short",
          [Query(increase(server("replay_evictions_total"), by="blocks"), "{{blocks}}")]),
])  # fmt: skip

COVERAGE = Row("Coverage", [
    Panel("Servers of every block", "How many servers hold each block, as the gateway that sees fewest sees it. "
          "0: nobody can answer until the operator has filled the slot.", "short",
          [Query(f"min by (model, block) ({gateway('block_servers')})", "{{model}} {{block}}")],
          kind="state-timeline", width=12, height=10, bad_below=1),
    Panel("Coverage", "Fewest servers of any block, by model.", "short",
          [Query(f"min by (model) ({gateway('coverage')})", "{{model}}")], width=6, height=10),
    Panel("Linked servers", "Servers that the gateways have a link to, and those of them that are about to "
          "leave.", "short", [
              Query(f"min by (model) ({gateway('servers')})", "{{model}}"),
              Query(f"max by (model) ({gateway('draining_servers')})", "{{model}}, draining"),
              Query(f"max by (model) ({gateway('suspected_servers')})", "{{model}}, silent"),
              Query(f"max by (model) ({gateway('ejected_servers')})", "{{model}}, ejected"),
          ], width=6, height=10),
])  # fmt: skip

RECOVERY = Row("Recovery", [
    Panel("Reroutes by cause", "Faults that sent a session in a turn to look for a route.", "short",
          [Query(increase(gateway("reroutes_total"), by="cause"), "{{cause}}")], stacked=True),
    Panel("Recovery time", "From a fault to the session's next token.", "s",
          quantiles(gateway("recovery_seconds"))),
    Panel("Recoveries by outcome", "resumed: went on; failed: the stream ended with an error; abandoned: the "
          "client left first.", "short",
          [Query(increase(gateway("recoveries_total"), by="outcome"), "{{outcome}}")], stacked=True),
    Panel("Held sessions", "Sessions that wait for a server or for room before they can go on.", "short",
          [Query(f"sum by (model) ({gateway('sessions', state='held')})", "{{model}}")]),
    Panel("Ejections by cause", "Servers that get no new sessions for a while. silent: no sign of life; overdue: rows "
          "and no work; failed: a step raised; slow: much slower than others like it.", "short",
          [Query(increase(gateway("ejections_total"), by="cause"), "{{cause}}")], stacked=True),
    Panel("Health of the worst server", "Of 1: what slowness, faults and full KV leave of it.", "short",
          [Query(f"min by (model) ({gateway('min_health_score')})", "{{model}}")]),
    Panel("Live migrations by outcome", "Sessions migrated off servers that are drained, stop or are slow. migrated: no client "
          "noticed; recomputed: without a KV copy; aborted: tried again; superseded: by a fault or the end of the turn.",
          "short", [Query(increase(gateway("migrations_total"), by="outcome"), "{{outcome}}")], stacked=True),
    Panel("Faults that servers report", "What stopped a session's rows on a server, by kind.", "short",
          [Query(increase(server("fault_reports_total"), by="kind"), "{{kind}}")], stacked=True),
])  # fmt: skip

SERVERS = Row("Servers", [
    Panel("Step time", "Time of one step of the model, by blocks.", "s", [
        Query(quantile(0.5, server("step_seconds"), by="blocks"), "{{blocks}} p50"),
        Query(quantile(0.99, server("step_seconds"), by="blocks"), "{{blocks}} p99"),
    ]),
    Panel("Rows", "Rows run through the blocks per second: a position of a session is one row on every hop.",
          "cps", [Query(rate(server("rows_total"), by="blocks"), "{{blocks}}")]),
    Panel("Rows per step", "Mean: how well sessions are batched.", "short",
          [Query(mean(server("step_rows"), by="blocks"), "{{blocks}}")]),
    Panel("Oldest waiting rows", "How long the rows that wait longest for a step have waited.", "s",
          [Query(f"max by (blocks) ({server('oldest_wait_seconds')})", "{{blocks}}")]),
    Panel("Sessions", "Sessions with state on servers, by blocks and state.", "short",
          [Query(f"sum by (blocks, state) ({server('sessions')})", "{{blocks}} {{state}}")]),
    Panel("Failed steps", "Steps of the model that raised.", "short",
          [Query(increase(server("failed_steps_total"), by="blocks"), "{{blocks}}")]),
    Panel("Links", "Links of the servers to gateways and to other servers.", "short",
          [Query(f"sum by (role) ({server('links')})", "{{role}}")]),
    Panel("Processor", "Cores in use by server processes.", "short", [
        Query("sum by (blocks, pod, instance) (rate(process_cpu_seconds_total[$__rate_interval]) * "
              f"on (instance) group_left (blocks) {server('build_info')})", "{{blocks}} {{pod}} {{instance}}"),
    ]),
    Panel("Memory", "Resident memory of server processes.", "bytes", [
        Query("sum by (blocks, pod, instance) (process_resident_memory_bytes * on (instance) "
              f"group_left (blocks) {server('build_info')})", "{{blocks}} {{pod}} {{instance}}"),
    ]),
])  # fmt: skip

SWARM_ROWS = (NOW, TRAFFIC, LATENCY, TOKENS, KV, COVERAGE, RECOVERY, SERVERS)
ROWS: Sequence[Row] = (*SWARM_ROWS, *OPERATOR_ROWS)


def variables() -> list[Json]:
    """Chosen at the top of the dashboard; all of everything at first."""
    namespaces = 'label_values({__name__=~"modelswarm_(gateway|server)_build_info"}, namespace)'
    models = 'label_values(modelswarm_gateway_servers{namespace=~"$namespace"}, model)'
    source = {
        "current": {},
        "hide": 0,
        "includeAll": False,
        "label": "Data source",
        "multi": False,
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "type": "datasource",
    }
    return [
        source,
        _choice("namespace", "Namespace", namespaces),
        _choice("model", "Model", models),
    ]


def _choice(name: str, label: str, query: str) -> Json:
    return {
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": label,
        "multi": True,
        "name": name,
        "options": [],
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "type": "query",
    }  # fmt: skip
