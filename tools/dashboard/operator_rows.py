"""The rows about pods and about the operator itself. Part of `rows.py`."""

from __future__ import annotations

from tools.dashboard.parts import Panel, Query, Row
from tools.dashboard.promql import gateway_pods, increase, operator, quantile, quantiles, rate

GATEWAY_VIEW, GATEWAY_WATCHES = "Pods as gateways know them", "Gateways and the API server"

PODS = Row("Pods", [
    Panel("Pods by state", "Server pods of all swarms.", "short",
          [Query(f"max by (state) ({operator('pods')})", "{{state}}")], stacked=True),
    Panel("Swarms by condition", "ModelSwarm resources by condition and its status.", "short",
          [Query(f"max by (condition, status) ({operator('swarms')})", "{{condition}}={{status}}")]),
    Panel("Pods created and deleted", "What the operator does to keep slots filled.", "short", [
        Query(increase(operator("pods_created_total"), by="role"), "created, {{role}}"),
        Query(increase(operator("pods_deleted_total"), by="role"), "deleted, {{role}}"),
    ]),
    Panel(GATEWAY_VIEW, "Server pods as the gateway that knows fewest knows them, by state.", "short",
          [Query(f"min by (state) ({gateway_pods('pods')})", "{{state}}")], stacked=True),
    Panel(GATEWAY_WATCHES, "Gateways that hear of changes to pods, and requests of gateways to the API server "
          "that failed. At 0 what is known stays, and streams go on.", "short", [
              Query(f"sum({gateway_pods('pod_watch_up')})", "gateways that watch"),
              Query(increase(gateway_pods("kube_api_failures_total")), "failed requests"),
          ]),
])  # fmt: skip

OPERATOR = Row("Operator", [
    Panel("Reconcile time", "Duration of one turn of one swarm.", "s",
          quantiles(operator("reconcile_seconds"))),
    Panel("Reconciles by result", "Turns per second by how they ended.", "ops",
          [Query(rate(operator("reconcile_seconds_count"), by="result"), "{{result}}")], stacked=True),
    Panel("Time from event to turn", "How long a swarm that was woken waited for its turn.", "s",
          quantiles(operator("queue_seconds"))),
    Panel("API requests", "Requests to the API server per second by verb and code.", "reqps",
          [Query(rate(operator("api_requests_total"), by="verb, code"), "{{verb}} {{code}}")], stacked=True),
    Panel("API request time", "Duration of requests to the API server by verb, watches left out.", "s", [
        Query(quantile(0.5, operator("api_request_seconds"), by="verb"), "{{verb}} p50"),
        Query(quantile(0.99, operator("api_request_seconds"), by="verb"), "{{verb}} p99"),
    ]),
    Panel("Leaders", "Operator processes that lead: 1, but for moments.", "short",
          [Query(f"sum({operator('leader')})", "leaders")]),
    Panel("Watches and lists", "Watches that had to start again, and full lists that failed.", "short", [
        Query(increase(operator("watch_restarts_total")), "watch restarts"),
        Query(increase(operator("resyncs_total"), by="result"), "lists, {{result}}"),
    ]),
])  # fmt: skip

OPERATOR_ROWS = (PODS, OPERATOR)
