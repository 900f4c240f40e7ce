"""A real swarm under faults, by hand: `make chaos SECONDS=60 SEED=7`, or `PYTHONPATH=tests python -m chaos --help`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from chaos.run import Options, chaos
from chaos.schedule import Fault
from support.models.tiny_models import make_toy

MODELS = ("hash", "torch")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as root:
        folder = make_toy(Path(root) / "toy")
        for options in options_of(sys.argv[1:]):
            outcome = chaos(options, folder, say)
            say(outcome.summary())
            if outcome.wrong:
                say(outcome.report())
                bad += 1
    return 1 if bad else 0


def options_of(arguments: Sequence[str]) -> list[Options]:
    """Return the options of each run of a command line."""
    given = vars(_parser().parse_args(arguments))
    model, seconds, faults = given.pop("model"), given.pop("seconds"), given.pop("faults")
    models = MODELS if model == "both" else (model,)
    given["faults"] = frozenset(faults or Fault)
    return [Options(model=one, seconds=seconds / len(models), **given) for one in models]


def _parser() -> argparse.ArgumentParser:
    usual = Options()
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults, in all")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--model", default="both", choices=(*MODELS, "both"), help="both: in turn")
    parser.add_argument("--streams", type=int, default=usual.streams)
    parser.add_argument("--spans", type=int, default=usual.spans)
    parser.add_argument("--replicas", type=int, default=usual.replicas, help="servers of each span")
    parser.add_argument("--gateways", type=int, default=usual.gateways)
    parser.add_argument(
        "--every", type=float, default=usual.every, help="seconds between two faults"
    )
    parser.add_argument("--new", type=int, default=usual.new, help="tokens of an answer, about")
    parser.add_argument("--each", action="store_true", help="fault comes before any comes again")
    parser.add_argument("--faults", type=Fault, nargs="*", choices=list(Fault), help="only these")
    return parser


if __name__ == "__main__":
    sys.exit(main())
