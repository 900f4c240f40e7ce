"""`python -m bench [NAME ...]`: run the named benchmarks, or all; exit 1 if a bar is missed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from bench.harness import Result, report

NAMES = (
    "two_spans_1",
    "two_spans_8",
    "hop",
    "gap_after_kill",
    "gap_after_freeze",
    "false_ejections",
    "drain_gap",
    "span_recovery",
    "failure_free_cost",
    "metrics_cost",
    "route_choice",
    "load_gini",
    "protocol_faults",
    "near_ties",
    "operator_converge",
    "operator_idle",
    "pod_replacement",
    "cluster_gap_after_kill",
)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    held = True
    for name in names or NAMES:
        run: Callable[[], Result] = importlib.import_module(f"bench.{name}").run
        held &= report(run())
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
