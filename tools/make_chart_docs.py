"""Write the table of the chart's values into docs/install.md, from the comments of values.yaml.

A comment `# -- text` above a key describes it; keys without one are groups. A test compares the table with the file.
Run by developers after a change of values.yaml.
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


def read_values() -> list[Value]:
    """Return the values with a description, in the file's order."""
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
                found.append(Value(".".join(path), _value_at(parsed, path), text))
            text = ""
    return found


def _value_at(tree: Any, path: list[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def render_table() -> str:
    rows = ["| value | default | what it does |", "|---|---|---|"]
    for value in read_values():
        default = json.dumps(value.default)
        rows.append(f"| `{value.path}` | `{default}` | {value.text.replace('|', '/')} |")
    return "\n".join(rows) + "\n"


def replace_table(page: str) -> str:
    head, rest = page.split(BEGIN)
    return head + BEGIN + render_table() + END + rest.split(END, 1)[1]


def main() -> int:
    PAGE.write_text(replace_table(PAGE.read_text()))
    print(f"docs/install.md: {len(read_values())} values")
    return 0


if __name__ == "__main__":
    sys.exit(main())
