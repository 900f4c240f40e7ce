"""A real swarm under faults, by hand: `make chaos SECONDS=60 SEED=7`, or `PYTHONPATH=tests python -m chaos --help`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from chaos.run import Options, chaos
from chaos.schedule import Fault
from swarm.toy import make_toy

MODELS = ("hash", "torch")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    given = _options()
    models = MODELS if given.model == "both" else (given.model,)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as root:
        folder = make_toy(Path(root) / "toy")
        for model in models:
            options = Options(
                model=model,
                seconds=given.seconds / len(models),
                seed=given.seed,
                streams=given.streams,
                spans=given.spans,
                gateways=given.gateways,
                every=given.every,
                faults=frozenset(given.faults or Fault),
            )
            outcome = chaos(options, folder, say)
            say(outcome.summary())
            if outcome.wrong:
                say(outcome.report())
                bad += 1
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults, in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="both", choices=(*MODELS, "both"), help="both: in turn")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--spans", type=int, default=2)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--every", type=float, default=1.5, help="seconds between two faults")
    parser.add_argument("--faults", type=Fault, nargs="*", choices=list(Fault), help="only these")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
