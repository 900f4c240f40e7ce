"""Write the table of the chart's values into docs/install.md, from the comments of values.yaml.

`# -- text` above a key describes it; keys without one are only groups. A test compares the table with the file.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "charts" / "modelswarm" / "values.yaml"
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- values: written by tools/make_chart_docs.py -->\n", "<!-- end of values -->"

_KEY = re.compile(r"( *)([A-Za-z][A-Za-z0-9_.]*):")
_MARK = "# -- "


@dataclass(frozen=True, slots=True)
class Value:
    path: str
    default: Any
    text: str


def documented() -> list[Value]:
    """In the file's order."""
    parsed = yaml.safe_load(VALUES.read_text())
    found: list[Value] = []
    parents: list[tuple[int, str]] = []
    text = ""
    for line in VALUES.read_text().splitlines():
        if line.lstrip().startswith(_MARK):
            text = line.lstrip().removeprefix(_MARK)
        elif match := _KEY.match(line):
            depth, name = len(match[1]), match[2]
            parents = [*(parent for parent in parents if parent[0] < depth), (depth, name)]
            if text:
                path = [part for _, part in parents]
                found.append(Value(".".join(path), _at(parsed, path), text))
            text = ""
    return found


def _at(tree: Any, path: list[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def table() -> str:
    rows = ["| value | default | what it does |", "|---|---|---|"]
    for value in documented():
        default = json.dumps(value.default)
        rows.append(f"| `{value.path}` | `{default}` | {value.text.replace('|', '/')} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    head, rest = page.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END, 1)[1]


def main() -> int:
    PAGE.write_text(with_table(PAGE.read_text()))
    print(f"docs/install.md: {len(documented())} values")
    return 0


if __name__ == "__main__":
    sys.exit(main())
