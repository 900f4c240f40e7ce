"""Entry point of `modelswarm-server`: handles stop signals before the slow imports, then runs the app."""

from __future__ import annotations

import sys

from modelswarm.process.early_signals import exit_on_signals
from modelswarm_serving.model.linear.product_caches import limit_product_caches


def main() -> int:
    exit_on_signals()
    limit_product_caches()
    from modelswarm_serving.app import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
