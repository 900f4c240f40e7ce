"""Write the table of docs/models.md from the table of families, and from the speeds of a benchmark.

    python tools/ci/make_model_page.py             # with the speeds of the last time
    python tools/ci/make_model_page.py --speeds    # with those of bench/results/generic_path.json

The text around the table is written by hand; a test compares the page with this program's output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelswarm.checkpoint.families.table import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
RESULT = ROOT / "bench" / "results" / "generic_path.json"
SPEEDS = Path(__file__).with_name("family_speeds.json")
BEGIN, END = "<!-- families: made by tools/ci/make_model_page.py -->\n", "<!-- end -->"
NOTHING = "–"


def render_table(speeds: Mapping[str, Any]) -> str:
    """Return the note about the speeds, and the table. `speeds`: the result of `generic_path`."""
    source = "the benchmark `generic_path` has not run yet"
    if speeds["figures"]:
        source = f"`generic_path` at {speeds['commit']}, {speeds['shape']}, one thread of {speeds['machine']}"
    lines = [
        f"Speeds: {source}.",
        "",
        "| `model_type` | class | path | over `generate` | generic over fused | refused |",
        "|---|---|---|---|---|---|",
    ]
    for model_type, family in sorted(FAMILIES.items()):
        measured = model_type.removesuffix("_text")  # the small models have no images
        cells = (
            f"`{model_type}`",
            f"`{family.architecture}`",
            family.path.value,
            _ratios(speeds["figures"], [f"{measured}_b1", f"{measured}_b8"]),
            _ratios(speeds["figures"], [f"{measured}_generic_b1", f"{measured}_generic_b8"]),
            "; ".join(family.refused) or NOTHING,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratios(figures: Mapping[str, float], names: Sequence[str]) -> str:
    if not all(name in figures for name in names):
        return NOTHING
    return " / ".join(f"{figures[name]:.2f}" for name in names)


def replace_table(text: str) -> str:
    """Return the page with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE}: the table must have its two markers")
    table = render_table(json.loads(SPEEDS.read_text(encoding="utf-8")))
    return f"{before}{BEGIN}{table}\n{END}{after}"


def take_speeds() -> None:
    """Keep what the page shows of the benchmark's last result."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    kept = {name: result[name] for name in ("commit", "machine", "shape")}
    figures = {name: round(ratio, 3) for name, ratio in sorted(result["figures"].items())}
    SPEEDS.write_text(json.dumps(kept | {"figures": figures}, indent=1) + "\n", encoding="utf-8")


def main(words: Sequence[str]) -> int:
    if list(words) not in ([], ["--speeds"]):
        print(__doc__, file=sys.stderr)
        return 2
    if words:
        take_speeds()
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
