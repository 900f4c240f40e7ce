"""`python -m bench.gpu`: run the benchmark of the CUDA path; without a GPU one sentence and exit code 0."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.__main__ import main

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "tests"))  # small models and oracles are there
    sys.exit(main(["gpu"]))
