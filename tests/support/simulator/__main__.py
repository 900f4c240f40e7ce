"""Run seeds from the command line: `PYTHONPATH=tests python -m support.simulator --switch loop --seeds 0:2000`."""

from __future__ import annotations

import argparse
import sys
import time

from support.simulator.scenarios.base import SWITCHES, draw
from support.simulator.trace import Violation
from support.simulator.world import Outcome, World, simulate


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    options = _options()
    if options.seed is not None:
        return _one(options.seed, options.switch, options.trace)
    first, last = (int(part) for part in options.seeds.split(":"))
    switches = SWITCHES if options.switch == "all" else (options.switch,)
    failed = sum(_many(range(first, last), switch, options.keep_going) for switch in switches)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="support.simulator", description=__doc__)
    parser.add_argument("--switch", default="mixed", choices=(*SWITCHES, "all"))
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell everything")
    parser.add_argument("--keep-going", type=int, default=1, help="stop after so many failures")
    return parser.parse_args()


def _one(seed: int, switch: str, trace: bool) -> int:
    world = World(draw(seed, switch), trace=trace)
    try:
        say(str(world.run()))
    except Exception as error:
        if not trace:
            raise
        say("\n".join(world.trace.lines()))
        say(f"{type(error).__name__}: {error}")
        return 1
    if trace:
        say("\n".join(world.trace.lines()))
    return 0


def _many(seeds: range, switch: str, keep_going: int) -> int:
    total, failed, began = Outcome(), 0, time.process_time()
    done = 0
    for seed in seeds:
        try:
            total.add(simulate(seed, switch))
        except Violation as violation:
            failed += 1
            text = str(violation)
            say(text if failed <= 1 else "\n".join(text.splitlines()[:2]))
            if failed >= keep_going:
                break
        done += 1
    cpu = time.process_time() - began
    say(
        f"{switch}: {done} seeds, {failed} violations, {total.sessions} sessions, "
        f"{total.tokens} tokens, {sum(total.faults.values())} faults {dict(total.faults)}, "
        f"{total.reroutes} reroutes {dict(total.causes)}, moves {dict(total.moves)}, "
        f"{total.balanced} balanced, {total.refused} refused, "
        f"{total.adopted} adopted, {total.lost} lost, {total.repeated} repeated, "
        f"longest wait {total.longest_wait:.1f} s, {total.events} events, {cpu:.1f} s CPU, "
        f"{total.sessions / max(cpu, 1e-9):.0f} sessions/s"
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
