"""Write the table of docs/models.md from the table of families.

    python tools/ci/make_model_page.py

The text around the table is written by hand; a test compares the page with this program's output.
"""

from __future__ import annotations

import sys
from pathlib import Path

from modelswarm.checkpoint.families.table import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: made by tools/ci/make_model_page.py -->\n", "<!-- end -->"


def render_table() -> str:
    lines = ["| `model_type` | class | path | refused |", "|---|---|---|---|"]
    for model_type, family in sorted(FAMILIES.items()):
        refused = "; ".join(family.refused) or "–"
        lines.append(
            f"| `{model_type}` | `{family.architecture}` | {family.path.value} | {refused} |"
        )
    return "\n".join(lines)


def replace_table(text: str) -> str:
    """Return the page with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE}: the table must have its two markers")
    return f"{before}{BEGIN}{render_table()}\n{END}{after}"


def main() -> int:
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
