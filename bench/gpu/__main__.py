"""`python -m bench.gpu [PART ...]`: benchmark of the CUDA path; without a GPU one sentence and exit code 0."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.report import PARTS, run
from bench.harness import report


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench.gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; none: all")
    names = parser.parse_args(arguments).parts
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    result = run(names)
    return 0 if result is None or report(result) else 1


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "tests"))  # small models and oracles are there
    sys.exit(main(sys.argv[1:]))
