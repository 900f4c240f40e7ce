"""Write the tables of docs/metrics.md from the metrics that the processes expose.

    python tools/make_metrics_page.py

The text around the tables is written by hand; a test compares the page with this program's output.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, `tools` is not found otherwise

from prometheus_client.core import Metric  # noqa: E402

from tools.dashboard.metric_registries import (  # noqa: E402
    exposed_name,
    gateway_registry,
    label_names,
    metric_families,
    operator_registry,
    server_registry,
)

PAGE = ROOT / "docs" / "metrics.md"


def render_tables() -> dict[str, str]:
    """Return the tables by the names of their markers in the page."""
    gateway = asyncio.run(gateway_registry(vllm_names=True))
    found = metric_families(gateway)
    return {
        "gateway": render_table(f for f in found if f.name.startswith("modelswarm_")),
        "vllm": render_table(f for f in found if f.name.startswith("vllm:")),
        "server": render_table(
            f for f in metric_families(server_registry()) if f.name.startswith("modelswarm_")
        ),
        "operator": render_table(
            f for f in metric_families(operator_registry()) if f.name.startswith("modelswarm_")
        ),
    }


def render_table(metrics: Iterable[Metric]) -> str:
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in metrics:
        labels = ", ".join(f"`{name}`" for name in label_names(family))
        lines.append(
            f"| `{exposed_name(family)}` | {family.type} | {labels} | {family.documentation} |"
        )
    return "\n".join(lines)


def replace_tables(text: str) -> str:
    """Return the page with new tables."""
    for name, made in render_tables().items():
        place = re.compile(rf"(<!-- {name}: [^\n]* -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
        parts = place.split(text)
        if len(parts) != 4:
            raise SystemExit(f"{PAGE}: the table {name!r} must have exactly one pair of markers")
        before, opening, closing, after = parts
        text = f"{before}{opening}{made}\n{closing}{after}"
    return text


def main() -> int:
    PAGE.write_text(replace_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
