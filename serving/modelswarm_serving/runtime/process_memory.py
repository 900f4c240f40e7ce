"""Measures the memory of a server's process on a CPU before it loads a model.

Run as a program by the build of the server image, after torch. Exit code 1 if the process takes more than the memory
plan counts.
"""

from __future__ import annotations

import sys

from modelswarm.placement.memory import PROCESS_BYTES
from modelswarm.placement.quantity import human_bytes
from modelswarm.process.memory_limit import read_resident_bytes
from modelswarm_serving.app import span_options
from modelswarm_serving.settings import parse_settings


def main() -> int:
    span_options(
        parse_settings(
            ["--model", "demo://counting", "--blocks", "0:8", "--name", "s", "--device", "cpu"]
        ),
        None,
    )
    measured = read_resident_bytes() or 0
    sys.stdout.write(
        f"a server takes {human_bytes(measured)} before it loads a model; the memory plan counts "
        f"{human_bytes(PROCESS_BYTES)} (PROCESS_BYTES in modelswarm/placement/memory.py)\n"
    )
    return int(measured > PROCESS_BYTES)


if __name__ == "__main__":
    sys.exit(main())
