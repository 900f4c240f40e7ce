"""Run seeds of the simulator: `PYTHONPATH=tests python -m support.simulator --scenario loop --seeds 0:2000`.

`--plants` prints for each planted bug the first seed that finds it, beside its budget.
"""

from __future__ import annotations

import argparse
import sys
import time

from support.simulator.planted.catalog import PLANTS
from support.simulator.scenarios.base import SCENARIOS, draw
from support.simulator.trace import Violation
from support.simulator.world import Outcome, World, simulate


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    options = _options()
    if options.plants:
        return _print_plants()
    if options.seed is not None:
        return _run_one(options.seed, options.scenario, options.trace)
    first, last = (int(part) for part in options.seeds.split(":"))
    names = SCENARIOS if options.scenario == "all" else (options.scenario,)
    failed = sum(_run_many(range(first, last), name, options.keep_going) for name in names)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="support.simulator", description=__doc__)
    parser.add_argument("--scenario", default="mixed", choices=(*SCENARIOS, "all"))
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST")
    parser.add_argument("--trace", action="store_true", help="with --seed: print all events")
    parser.add_argument("--keep-going", type=int, default=1, help="stop after so many violations")
    parser.add_argument("--plants", action="store_true", help="print the table of planted bugs")
    return parser.parse_args()


def _print_plants() -> int:
    """Print the table; return 1 if a bug is not found, or first beyond half of its budget."""
    code = 0
    say(f"{'planted bug':<36} {'scenario':<13} {'first seed':>10} {'budget':>7} {'CPU s':>6}")
    for name, plant in PLANTS.items():
        began = time.process_time()
        seed = plant.finding_seed()
        cpu = time.process_time() - began
        remark = "" if seed is not None else "  not found"
        if seed is not None and plant.is_near_budget(seed):
            remark = "  beyond half of the budget"
        code |= bool(remark)
        found = "-" if seed is None else str(seed)
        say(f"{name:<36} {plant.scenario:<13} {found:>10} {plant.budget:>7} {cpu:>6.1f}{remark}")
    return code


def _run_one(seed: int, scenario: str, trace: bool) -> int:
    world = World(draw(seed, scenario), trace=trace)
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


def _run_many(seeds: range, scenario: str, keep_going: int) -> int:
    total, failed, began = Outcome(), 0, time.process_time()
    done = 0
    for seed in seeds:
        try:
            total.add(simulate(seed, scenario))
        except Violation as violation:
            failed += 1
            text = str(violation)
            say(text if failed <= 1 else "\n".join(text.splitlines()[:2]))
            if failed >= keep_going:
                break
        done += 1
    cpu = time.process_time() - began
    say(
        f"{scenario}: {done} seeds, {failed} violations, {total.sessions} sessions, "
        f"{total.tokens} tokens, {sum(total.faults.values())} faults {dict(total.faults)}, "
        f"{total.reroutes} reroutes {dict(total.causes)}, migrations {dict(total.migrations)}, "
        f"{total.rebalanced} rebalanced, {total.refused} refused, "
        f"{total.taken_over} taken over, {total.resumed} resumed, "
        f"{total.forked} positions forked, {total.returned} rows returned, "
        f"{total.lost} lost, {total.repeated} repeated, "
        f"longest wait {total.longest_wait:.1f} s, longest without progress of any session "
        f"{total.longest_starvation:.1f} s, without an owner {total.longest_ownerless:.1f} s, "
        f"{total.events} events, {cpu:.1f} s CPU, "
        f"{total.sessions / max(cpu, 1e-9):.0f} sessions/s"
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
