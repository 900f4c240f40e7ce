"""The dashboard's rows of panels, each with its Prometheus queries.

Metric names are those of docs/metrics.md. Each gateway sees the whole swarm: counters are summed over gateways,
gauges are taken from the gateway with the worst value. Used by `tools/make_dashboard.py`. Knows no JSON.
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
    Panel("Requests", "Ended requests per second, of any status.", "reqps",
          [Query(rate(gateway("requests_total")))], kind="stat", width=4, height=4),
    Panel("Generated", "Generated tokens per second.", "suffix: tok/s",
          [Query(rate(gateway("tokens_total", kind="generated")))], kind="stat", width=4, height=4,
          decimals=1),
    Panel("Active sessions", "Sessions in a turn: running, or being routed.",
          "short", [Query(f"sum({gateway('sessions', state='running|fencing|held')})")],
          kind="stat", width=4, height=4),
    Panel("Lowest coverage", "Servers of the block that has the fewest, over all models. At 0 a model is down; at 1 "
          "after the next failure sessions are held for a replacement.", "short",
          [Query(f"min({gateway('coverage')})")], kind="stat", width=4, height=4, bad_below=1),
    Panel("Streams recovered", "Answers completed in spite of a fault, in the time shown.", "short",
          [Query(increase(gateway("streams_total", outcome="recovered"), window="$__range"))],
          kind="stat", width=4, height=4, decimals=0),
    Panel("Streams failed", "Answers that ended with an error, in the time shown.", "short",
          [Query(increase(gateway("streams_total", outcome="failed"), window="$__range"))],
          kind="stat", width=4, height=4, bad_from=1, decimals=0),
])  # fmt: skip

TRAFFIC = Row("Traffic", [
    Panel("Requests by status", "Ended requests per second by HTTP status, of HTTP and gRPC. 429: no room; 499: "
          "the client disconnected; 503: no servers, or shutting down.", "reqps",
          [Query(rate(gateway("requests_total"), by="code"), "{{code}}")], stacked=True),
    Panel("Sessions by state", "running: generates tokens; fencing: gets a new route; held: waits for a server "
          "or for room; parked: kept between turns.", "short",
          [Query(f"sum by (state) ({gateway('sessions')})", "{{state}}")], stacked=True),
    Panel("Answers by outcome", "Ended turns per second by outcome. recovered: completed in spite of a "
          "fault.", "reqps",
          [Query(rate(gateway("streams_total"), by="outcome"), "{{outcome}}")], stacked=True),
])  # fmt: skip

LATENCY = Row("Latency", [
    Panel("Time to first token", "Time from a request to its first token.", "s",
          quantiles(gateway("time_to_first_token_seconds"))),
    Panel("Inter-token latency", "Time between the tokens of one answer, recoveries included.", "s",
          quantiles(gateway("inter_token_seconds"))),
    Panel("Request duration", "Time from a request to its answer's end, of completed answers.", "s",
          quantiles(gateway("request_seconds"))),
    Panel("Parts of the time to first token", "Mean seconds. wait: tokenizing and queueing in the gateway; "
          "prefill: from there to the first token.", "s",
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
    Panel("Prompt tokens", "Per second, by model. reused: still in a named session's KV, not computed again.",
          "suffix: tok/s", [
              Query(rate(gateway("tokens_total", kind="prompt"), by="model"), "{{model}}"),
              Query(rate(gateway("reused_tokens_total"), by="model"), "{{model}}, reused"),
          ]),
    Panel("Replayed tokens", "Tokens computed again per second after faults: the cost of recoveries.", "suffix: tok/s",
          [Query(rate(gateway("replayed_tokens_total"), by="model"), "{{model}}")]),
])  # fmt: skip

KV = Row("KV", [
    Panel("Fullest blocks", "Share of KV pages in use, on the blocks with least room. New sessions are refused "
          "when it nears 1 less the share reserved for recovery.", "percentunit",
          [Query(f"max by (model) ({gateway('kv_usage_ratio')})", "{{model}}")], most=1, bad_from=0.9),
    Panel("Pages by state", "Pages of all servers. used: hold KV; reserved: allocated to a session for later "
          "tokens; free.", "short",
          [Query(f"sum by (state) ({server('kv_pages')})", "{{state}}")], stacked=True),
    Panel("Pages in use by server", "Share of each server's pages that are allocated to sessions.", "percentunit", [
        Query(f"1 - sum by (blocks, pod, instance) ({server('kv_pages', state='free')}) / "
              f"sum by (blocks, pod, instance) ({server('kv_pages')})", "{{blocks}} {{pod}} {{instance}}"),
    ], most=1, bad_from=0.9),
    Panel("Replay log", "Memory of the rows that servers retain to rebuild a lost successor, and its limit.",
          "bytes", [
              Query(f"sum by (blocks) ({server('replay_bytes')})", "{{blocks}}"),
              Query(f"sum by (blocks) ({server('replay_limit_bytes')})", "{{blocks}}, limit"),
          ]),
    Panel("Replay log evictions", "Sessions whose rows were dropped for lack of memory: a recovery then starts "
          "further back.", "short",
          [Query(increase(server("replay_evictions_total"), by="blocks"), "{{blocks}}")]),
])  # fmt: skip

COVERAGE = Row("Coverage", [
    Panel("Servers of every block", "Servers of each block, as seen by the gateway that sees fewest. "
          "0: no answers until the operator has filled the slot.", "short",
          [Query(f"min by (model, block) ({gateway('block_servers')})", "{{model}} {{block}}")],
          kind="state-timeline", width=12, height=10, bad_below=1),
    Panel("Coverage", "Servers of the block that has the fewest, by model.", "short",
          [Query(f"min by (model) ({gateway('coverage')})", "{{model}}")], width=6, height=10),
    Panel("Linked servers", "Servers with a link to the gateways, and those that are draining, silent or ejected.",
          "short", [
              Query(f"min by (model) ({gateway('servers')})", "{{model}}"),
              Query(f"max by (model) ({gateway('draining_servers')})", "{{model}}, draining"),
              Query(f"max by (model) ({gateway('suspected_servers')})", "{{model}}, silent"),
              Query(f"max by (model) ({gateway('ejected_servers')})", "{{model}}, ejected"),
          ], width=6, height=10),
])  # fmt: skip

RECOVERY = Row("Recovery", [
    Panel("Reroutes by cause", "Faults after which a session in a turn needed a new route.", "short",
          [Query(increase(gateway("reroutes_total"), by="cause"), "{{cause}}")], stacked=True),
    Panel("Recovery time", "Time from a fault to the session's next token.", "s",
          quantiles(gateway("recovery_seconds"))),
    Panel("Recoveries by outcome", "resumed: continued; failed: the stream ended with an error; abandoned: the "
          "client disconnected first.", "short",
          [Query(increase(gateway("recoveries_total"), by="outcome"), "{{outcome}}")], stacked=True),
    Panel("Held sessions", "Sessions that wait for a server or for room before they can continue.", "short",
          [Query(f"sum by (model) ({gateway('sessions', state='held')})", "{{model}}")]),
    Panel("Ejections by cause", "Servers that get no new sessions for a while. silent: no heartbeat; overdue: waiting "
          "rows but no step; failed: a step raised an error; slow: much slower than its replicas.", "short",
          [Query(increase(gateway("ejections_total"), by="cause"), "{{cause}}")], stacked=True),
    Panel("Lowest health score", "1: healthy; slowness, faults and full KV lower it.", "short",
          [Query(f"min by (model) ({gateway('min_health_score')})", "{{model}}")]),
    Panel("Live migrations by outcome", "Sessions migrated off servers that are drained, shut down or are slow. "
          "migrated: by a KV copy; recomputed: without one; aborted: tried again later; superseded: a fault or the end "
          "of the turn came first.",
          "short", [Query(increase(gateway("migrations_total"), by="outcome"), "{{outcome}}")], stacked=True),
    Panel("Fault reports of servers", "Faults that stopped a session's rows on a server, by kind.", "short",
          [Query(increase(server("fault_reports_total"), by="kind"), "{{kind}}")], stacked=True),
])  # fmt: skip

SERVERS = Row("Servers", [
    Panel("Step time", "Duration of one step of the model, by blocks.", "s", [
        Query(quantile(0.5, server("step_seconds"), by="blocks"), "{{blocks}} p50"),
        Query(quantile(0.99, server("step_seconds"), by="blocks"), "{{blocks}} p99"),
    ]),
    Panel("Rows", "Rows run through the blocks per second: a position of a session is one row on every hop.",
          "cps", [Query(rate(server("rows_total"), by="blocks"), "{{blocks}}")]),
    Panel("Rows per step", "Mean batch size of a step.", "short",
          [Query(mean(server("step_rows"), by="blocks"), "{{blocks}}")]),
    Panel("Oldest waiting rows", "Age of the oldest rows that wait for a step.", "s",
          [Query(f"max by (blocks) ({server('oldest_wait_seconds')})", "{{blocks}}")]),
    Panel("Sessions", "Sessions with state on servers, by blocks and state.", "short",
          [Query(f"sum by (blocks, state) ({server('sessions')})", "{{blocks}} {{state}}")]),
    Panel("Failed steps", "Steps of the model that raised an error; full: those that found the device full.", "short",
          [Query(increase(server("failed_steps_total"), by="blocks"), "{{blocks}}"),
           Query(increase(server("out_of_memory_steps_total"), by="blocks"), "{{blocks}}, full")]),
    Panel("Training passes", "Forward and backward passes of training clients; failed: raised an error.", "short",
          [Query(increase(server("passes_total"), by="blocks"), "{{blocks}}"),
           Query(increase(server("failed_passes_total"), by="blocks"), "{{blocks}}, failed")]),
    Panel("Part of a pass", "Duration of one part of a pass: a row of a session waits for one at most.", "s",
          [Query(quantile(0.99, server("pass_part_seconds"), by="blocks"), "{{blocks}} p99")]),
    Panel("Links", "Links of the servers to gateways and to other servers.", "short",
          [Query(f"sum by (role) ({server('links')})", "{{role}}")]),
    Panel("CPU", "Cores in use by server processes.", "short", [
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
    """Return the choices at the top of the dashboard; at first, everything is selected."""
    installations = (
        'label_values({__name__=~"modelswarm_(gateway|operator)_build_info"}, namespace)'
    )
    namespaces = "label_values(modelswarm_server_build_info, namespace)"
    # Unlike the servers, sessions are those of adapters too.
    models = 'label_values(modelswarm_gateway_sessions{namespace=~"$installation"}, model)'
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
        _choice("installation", "Installation", installations),
        _choice("namespace", "Namespace of servers", namespaces),
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
