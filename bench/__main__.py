"""`python -m bench [NAME ...]`: run the named benchmarks, or all; exit 1 if a bar is missed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from bench.harness import Result, report

FOLDERS = {
    "engine": (
        "engine_alone",
        "two_spans_1",
        "two_spans_8",
        "prefill_two_spans",
        "generic_path",
    ),
    "speed": (
        "hop",
        "step_breakdown",
        "failure_free_cost",
        "metrics_cost",
        "sampler_cost",
        "stream_cpu",
        "idle_sessions",
        "guided_overhead",
        "forced_tokens",
        "cli_start",
    ),
    "recovery": (
        "gap_after_kill",
        "gap_after_freeze",
        "false_ejections",
        "drain_gap",
        "span_recovery",
        "protocol_faults",
        "near_ties",
    ),
    "routing": ("route_choice", "load_gini"),
    "client": ("pipeline_256", "batch_10k", "hf_client"),
    "cluster": (
        "operator_converge",
        "operator_idle",
        "pod_replacement",
        "cluster_gap_after_kill",
    ),
}
NAMES = {name: f"bench.{folder}.{name}" for folder, names in FOLDERS.items() for name in names}
NAMES["gpu"] = "bench.gpu.report"


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    all_met = True
    for name in names or NAMES:
        run: Callable[[], Result | None] = importlib.import_module(NAMES[name]).run
        result = run()
        all_met &= result is None or report(
            result
        )  # None: not possible on this machine, as it says
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
