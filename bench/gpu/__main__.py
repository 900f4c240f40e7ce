"""`python -m bench.gpu [--minutes N] [PART ...]`: benchmark of the CUDA path; without a GPU it says so and exits 0."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.report import MINUTES, PARTS, run
from bench.harness import report

ROOT = Path(__file__).parents[2]
PRODUCT = (ROOT, ROOT / "serving", ROOT / "gateway")


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


def use_checkout() -> None:
    """Let this process and those that it starts import this checkout: it need not be installed."""
    product = [str(folder) for folder in PRODUCT]
    paths = [*product, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of servers and gateways
    sys.path += [*product, str(ROOT / "tests")]  # small models and oracles are in tests


if __name__ == "__main__":
    use_checkout()
    sys.exit(main(sys.argv[1:]))
