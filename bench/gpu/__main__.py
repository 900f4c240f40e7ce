"""`python -m bench.gpu [--minutes N] [PART ...]`: benchmark of the CUDA path; without a GPU it says so and exits 0."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.report import MINUTES, PARTS, run
from bench.harness import report


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench.gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; none: all")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="limit; default: %(default)g"
    )
    given = parser.parse_args(arguments)
    names = given.parts
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    if not given.minutes > 0:
        parser.error(f"--minutes: {given.minutes:g} is no time; allowed: more than 0")
    result = run(names, given.minutes)
    return 0 if result is None or report(result) else 1


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "tests"))  # small models and oracles are there
    sys.exit(main(sys.argv[1:]))
