"""The dashboard's rows about pods and about the operator itself. Used by `rows.py`."""

from __future__ import annotations

from tools.dashboard.parts import Panel, Query, Row
from tools.dashboard.promql import gateway_pods, increase, operator, quantile, quantiles, rate

GATEWAY_VIEW, GATEWAY_WATCHES = "Pods as gateways see them", "Gateways and the API server"

PODS = Row("Pods", [
    Panel("Pods by state", "Server pods of all swarms.", "short",
          [Query(f"max by (state) ({operator('pods')})", "{{state}}")], stacked=True),
    Panel("Swarms by condition", "ModelSwarm resources by condition and its status.", "short",
          [Query(f"max by (condition, status) ({operator('swarms')})", "{{condition}}={{status}}")]),
    Panel("Pods created and deleted", "Changes the operator makes to keep slots filled.", "short", [
        Query(increase(operator("pods_created_total"), by="role"), "created, {{role}}"),
        Query(increase(operator("pods_deleted_total"), by="role"), "deleted, {{role}}"),
    ]),
    Panel(GATEWAY_VIEW, "Server pods by state, as seen by the gateway that sees fewest.", "short",
          [Query(f"min by (state) ({gateway_pods('pods')})", "{{state}}")], stacked=True),
    Panel(GATEWAY_WATCHES, "Gateways with a working pod watch, and their failed requests to the API server. "
          "At 0, gateways keep the known pods, and streams continue.", "short", [
              Query(f"sum({gateway_pods('pod_watch_up')})", "gateways that watch"),
              Query(increase(gateway_pods("kube_api_failures_total")), "failed requests"),
          ]),
])  # fmt: skip

OPERATOR = Row("Operator", [
    Panel("Reconcile time", "Duration of one reconcile of one swarm.", "s",
          quantiles(operator("reconcile_seconds"))),
    Panel("Reconciles by result", "Reconciles per second by result.", "ops",
          [Query(rate(operator("reconcile_seconds_count"), by="result"), "{{result}}")], stacked=True),
    Panel("Queue time", "Time from an event to the reconcile of its swarm.", "s",
          quantiles(operator("queue_seconds"))),
    Panel("API requests", "Requests to the API server per second by verb and code.", "reqps",
          [Query(rate(operator("api_requests_total"), by="verb, code"), "{{verb}} {{code}}")], stacked=True),
    Panel("API request time", "Duration of requests to the API server by verb, without watches.", "s", [
        Query(quantile(0.5, operator("api_request_seconds"), by="verb"), "{{verb}} p50"),
        Query(quantile(0.99, operator("api_request_seconds"), by="verb"), "{{verb}} p99"),
    ]),
    Panel("Leaders", "Operator processes that lead: 1, except for moments.", "short",
          [Query(f"sum({operator('leader')})", "leaders")]),
    Panel("Watches and lists", "Watches that were restarted, and full lists by result.", "short", [
        Query(increase(operator("watch_restarts_total")), "watch restarts"),
        Query(increase(operator("resyncs_total"), by="result"), "lists, {{result}}"),
    ]),
])  # fmt: skip

OPERATOR_ROWS = (PODS, OPERATOR)
