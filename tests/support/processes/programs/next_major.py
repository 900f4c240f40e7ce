"""A server or a gateway of the next major version of the protocol; a gateway by its flag `--http`."""

from __future__ import annotations

import importlib
import sys

from modelswarm.protocol import messages


def main() -> int:
    major, minor = messages.PROTOCOL_VERSION
    messages.PROTOCOL_VERSION = (major + 1, minor)  # before any module takes it
    name = "modelswarm_gateway" if "--http" in sys.argv else "modelswarm_serving"
    code: int = importlib.import_module(f"{name}.__main__").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
