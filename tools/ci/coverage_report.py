"""Measure which lines of the product the tests run: `make coverage` (fast tier), `make coverage TIER=full`.

Every test process and every Python process that it starts is measured ([tool.coverage.run] in pyproject.toml). Not
counted: what runs in a container of the test cluster, and what a process did that SIGKILL ended. Writes one line per
folder and the lowest files to build/tests/coverage.txt, and the whole report to build/tests/coverage.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tools.ci import run_tests

COVERAGE = [sys.executable, "-m", "coverage"]
LOWEST = 20  # files with the most lines that no test ran


def main(tier: str) -> int:
    results = run_tests.RESULTS
    data = results.with_name("coverage")
    for old in data.glob("data*"):
        old.unlink()
    data.mkdir(parents=True, exist_ok=True)
    os.environ["COVERAGE_FILE"] = str(data / "data")
    failed = run_tests.main(tier, (), runner=(*COVERAGE, "run", "-m"))
    for words in (["combine", "-q"], ["json", "-q", "-o", str(results / "coverage.json")]):
        subprocess.run([*COVERAGE, *words], cwd=run_tests.ROOT, check=True)
    files = json.loads((results / "coverage.json").read_text(encoding="utf-8"))["files"]
    text = "\n".join(report({name: file["summary"] for name, file in files.items()})) + "\n"
    (results / "coverage.txt").write_text(text, encoding="utf-8")
    print(text)
    return failed


def report(files: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return one line per folder, the total, and the files with the most lines that were not run."""
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, summary in files.items():
        for folder in {str(Path(name).parent), "total"}:
            folders[folder][0] += summary["covered_lines"]
            folders[folder][1] += summary["num_statements"]
    total = folders.pop("total")
    lines = [row(folder, *counts) for folder, counts in sorted(folders.items())]
    lowest = sorted(files, key=lambda name: -files[name]["missing_lines"])[:LOWEST]
    lines += [row("total", *total), "", "most lines that no test ran:"]
    lines += [
        row(name, files[name]["covered_lines"], files[name]["num_statements"]) for name in lowest
    ]
    return lines


def row(name: str, covered: int, statements: int) -> str:
    percent = 100 * covered / statements if statements else 100.0
    return f"{name:<64}{covered:>6} of {statements:>6} {percent:>6.1f} %"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "fast"))
