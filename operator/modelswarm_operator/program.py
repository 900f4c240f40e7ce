"""`modelswarm-operator` as it is installed: can be asked to stop before it has imported what it needs."""

from __future__ import annotations

from modelswarm.first_process import end_when_asked


def main() -> int:
    end_when_asked()
    from modelswarm_operator.main import main as operate

    return operate()
