"""Builds the PromQL expressions of the dashboard. Used by its rows."""

from __future__ import annotations

from tools.dashboard.parts import Query

# Gateways and operator are in the namespace of their installation, servers in those of their swarms.
INSTALLATION = 'namespace=~"$installation"'
MODEL = 'model=~"$model"'
WINDOW = "$__rate_interval"


def gateway(name: str, **labels: str) -> str:
    """Return the selector of a gateway's metric for the chosen models; a value may be alternatives, as `a|b`."""
    return _selector(f"modelswarm_gateway_{name}", labels, f"{INSTALLATION},{MODEL}")


def gateway_pods(name: str) -> str:
    """Return the selector of a gateway's metric about pods, which has no model label."""
    return _selector(f"modelswarm_gateway_{name}", {}, INSTALLATION)


def server(name: str, **labels: str) -> str:
    return _selector(f"modelswarm_server_{name}", labels, f'namespace=~"$namespace",{MODEL}')


def operator(name: str, **labels: str) -> str:
    """Return the selector of an operator's metric, which has no model label."""
    return _selector(f"modelswarm_operator_{name}", labels, INSTALLATION)


def rate(selector: str, by: str = "") -> str:
    """Return the rate per second, summed by labels."""
    return f"{_sum(by)}(rate({selector}[{WINDOW}]))"


def increase(selector: str, by: str = "", window: str = WINDOW) -> str:
    return f"{_sum(by)}(increase({selector}[{window}]))"


def mean(histogram: str, by: str = "") -> str:
    return f"{rate(_part(histogram, 'sum'), by)} / {rate(_part(histogram, 'count'), by)}"


def quantile(q: float, histogram: str, by: str = "") -> str:
    labels = ", ".join(label for label in (by, "le") if label)
    return f"histogram_quantile({q}, {rate(_part(histogram, 'bucket'), labels)})"


def quantiles(histogram: str, by: str = "") -> list[Query]:
    legend = f"{{{{{by}}}}} " if by else ""
    wanted = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    return [Query(quantile(q, histogram, by), legend + name) for q, name in wanted]


def _selector(name: str, labels: dict[str, str], always: str) -> str:
    chosen = [f'{label}{"=~" if "|" in value else "="}"{value}"' for label, value in labels.items()]
    inside = ",".join(part for part in (always, *chosen) if part)
    return f"{name}{{{inside}}}" if inside else name


def _part(histogram: str, part: str) -> str:
    """Return `name_part{labels}` for `name{labels}`."""
    name, brace, labels = histogram.partition("{")
    return f"{name}_{part}{brace}{labels}"


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
