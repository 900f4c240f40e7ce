"""Entry point of `modelswarm-operator`. It can be stopped by a signal before its imports are complete."""

from __future__ import annotations

import sys

from modelswarm.process.early_signals import exit_on_signals


def main() -> int:
    exit_on_signals()
    from modelswarm_operator.app import main as operate

    return operate()


if __name__ == "__main__":
    sys.exit(main())
