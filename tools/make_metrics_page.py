"""Write the tables of docs/metrics.md from what the processes really show.

    python tools/make_metrics_page.py

The words around the tables are written by hand; a test compares the page with what this makes.
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
    families,
    gateway_registry,
    label_names,
    operator_registry,
    server_registry,
    shown_name,
)

PAGE = ROOT / "docs" / "metrics.md"


def tables() -> dict[str, str]:
    """By the name of the place in the page."""
    gateway = asyncio.run(gateway_registry(vllm_names=True))
    found = families(gateway)
    return {
        "gateway": table(f for f in found if f.name.startswith("modelswarm_")),
        "vllm": table(f for f in found if f.name.startswith("vllm:")),
        "server": table(f for f in families(server_registry()) if f.name.startswith("modelswarm_")),
        "operator": table(
            f for f in families(operator_registry()) if f.name.startswith("modelswarm_")
        ),
    }


def table(metrics: Iterable[Metric]) -> str:
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in metrics:
        labels = ", ".join(f"`{name}`" for name in label_names(family))
        lines.append(
            f"| `{shown_name(family)}` | {family.type} | {labels} | {family.documentation} |"
        )
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, made in tables().items():
        place = re.compile(rf"(<!-- {name}: [^\n]* -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
        parts = place.split(text)
        if len(parts) != 4:
            raise SystemExit(f"{PAGE}: there is no one place for the table {name!r}")
        before, opening, closing, after = parts
        text = f"{before}{opening}{made}\n{closing}{after}"
    return text


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
