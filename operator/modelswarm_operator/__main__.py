"""`modelswarm-operator` as it is installed: can be asked to stop before it has imported what it needs."""

from __future__ import annotations

import sys

from modelswarm.process.early_signals import exit_on_signals


def main() -> int:
    exit_on_signals()
    from modelswarm_operator.app import main as operate

    return operate()


if __name__ == "__main__":
    sys.exit(main())
