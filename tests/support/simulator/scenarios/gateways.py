"""Scenarios of gateways that crash, stall and take over each other's sessions (R19: leases, R20: takeover).

Used by `base.py`, which has the list of all.
"""

from __future__ import annotations

import random
from dataclasses import replace

from support.simulator.ring_coverage import Span
from support.simulator.scenario import Conditions, Layout, Scenario

# Sizes of `handover`: positions of the longest turn, positions that any session holds at rest, sessions of a world.
MOST_POSITIONS = 200
REST_POSITIONS = 60
MOST_SESSIONS = 4


def gateways(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways share servers and are killed; their clients lose the sessions, new clients begin others."""
    faults = replace(
        scenario.faults,
        mean_gap=0.1,
        weights={"kill_gateway": 0.5, "drop_link": 1.0, "kill": 0.3},
        max_count=20,
    )
    layout = replace(scenario.layout, lease_seconds=rng.choice((0.1, 1.0, 2.0)))
    layout = replace(layout, gateways=rng.choice((1, 2)))
    if rng.random() < 0.5:  # full of hops of the killed gateway
        layout = replace(layout, total_pages=120 // layout.page_size + 1)
    load = replace(scenario.load, no_limit_chance=0.0)
    return replace(scenario, layout=layout, faults=faults, load=load)


def adoptions(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways are killed, and other gateways take over their sessions from the servers' copies."""
    layout = replace(scenario.layout, gateways=2, lease_seconds=rng.choice((0.6, 1.0, 2.0)))
    weights = {
        "kill_gateway": 1.0,
        "drop_link": rng.choice((0.0, 1.0)),
        "kill": rng.choice((0.0, 0.3)),
    }
    faults = replace(scenario.faults, mean_gap=0.3, weights=weights, max_count=6, until=1.5)
    load = replace(scenario.load, turns=rng.randint(2, 5), think_seconds=0.1, no_limit_chance=0.0)
    return replace(
        scenario,
        layout=layout,
        faults=faults,
        load=load,
        can_take_over=True,
        max_wait_seconds=20.0,
        max_ownerless_seconds=10.0,
    )


def successors(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways are killed, and a supervisor's next gateway ends their leases at once."""
    return replace(doomed(scenario, rng), has_supervisor=True)


def doomed(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways are killed while they send Fences: all that clients have read must still be found."""
    scenario = adoptions(scenario, rng)
    conditions = _without_spikes(scenario)
    weights = {"kill_fencing_gateway": 1.0, "kill_gateway": 0.2}
    faults = replace(scenario.faults, weights=weights, mean_gap=0.1, max_count=12, until=3.0)
    return replace(scenario, faults=faults, conditions=conditions, max_wait_seconds=30.0)


def asleep(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways stall while others take over their sessions, and then continue as if they still owned them."""
    scenario = adoptions(scenario, rng)
    conditions, layout = scenario.conditions, scenario.layout
    spans = layout.spans + tuple(dict.fromkeys(layout.spans))
    layout = replace(layout, spans=spans, max_length=600)
    weights = {"stall_gateway": 1.0}
    others = rng.choice(("none", "drains", "all"))
    if others != "all":
        conditions = _without_spikes(scenario)
    if others != "none":
        weights["drain_taken_over"] = 3.0
    if others == "all":
        weights |= {kind: rng.choice((0.0, 0.5)) for kind in ("drop_link", "kill", "drain_request")}
    faults = replace(scenario.faults, weights=weights, mean_gap=0.1, max_count=8, until=5.0)
    load = replace(
        scenario.load,
        max_tokens=(20, 80),
        slow_reader_chance=0.7,
        read_seconds=rng.choice((0.02, 0.05)),
        quit_chance=0.0,
    )
    return replace(
        scenario,
        layout=layout,
        conditions=conditions,
        faults=faults,
        load=load,
        max_wait_seconds=30.0,
    )


def rivals(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways are killed, and two others take over each of their sessions at once, each with its own turn."""
    scenario = _small(adoptions(scenario, rng), rng)
    layout = replace(
        scenario.layout, gateways=3, lease_seconds=0.4, max_live_input_tokens=rng.choice((0, 256))
    )
    conditions = replace(
        _without_spikes(scenario),
        latency=rng.choice((0.002, 0.01)),
        bulk_factor=rng.choice((0.1, 1.0, 5.0)),
        step_seconds=rng.choice((0.001, 0.01, 0.05)),
        duplicate_chance=0.0,
    )
    faults = replace(
        scenario.faults,
        weights={"kill_gateway": 1.0},
        mean_gap=0.3,
        burst_chance=0.0,
        max_count=3,
        until=2.0,
    )
    return replace(
        scenario,
        layout=layout,
        conditions=conditions,
        faults=faults,
        has_rivals=True,
        forwards_requests=True,
    )


def handover(scenario: Scenario, rng: random.Random) -> Scenario:
    """Clients leave turns and return at any gateway; gateways are ended or killed and restart under their names.

    In half of the worlds each span has one server, and turns are refused. There is room for one turn up to the end of
    the context, and for the KV of all other sessions.
    """
    scenario = _small(adoptions(scenario, rng), rng)
    has_kills, is_tight = rng.random() < 0.5, rng.random() < 0.5
    layout = replace(
        scenario.layout,
        gateways=rng.choice((2, 3)),
        lease_seconds=rng.choice((0.5, 2.0)) if has_kills else 10.0,
        grant_seconds=2.0,
        max_length=MOST_POSITIONS,
    )
    weights = {"leave": 2.0, "hand_over": 1.0, "kill_gateway": 1.0 if has_kills else 0.0}
    if is_tight:
        positions = MOST_POSITIONS + (MOST_SESSIONS - 1) * REST_POSITIONS
        pages = -(-positions // layout.page_size) + MOST_SESSIONS
        layout = replace(layout, spans=_one_route(layout), total_pages=pages * 10 // 9 + 1)
        weights["kill"] = rng.choice((0.0, 1.0))
    conditions = replace(
        _without_spikes(scenario),
        latency=rng.choice((0.002, 0.02)),
        duplicate_chance=0.0,
    )
    faults = replace(
        scenario.faults,
        weights=weights,
        mean_gap=0.2,
        burst_chance=0.1,
        max_count=8,
        until=4.0,
        permanent_chance=0.0,
    )
    load = replace(
        scenario.load,
        sessions=2,
        max_sessions=MOST_SESSIONS,
        turns=3,
        prompt=(1, 6),
        max_tokens=(5, 15),
        no_limit_chance=0.8 if is_tight else 0.2,
    )
    return replace(
        scenario,
        layout=layout,
        conditions=conditions,
        faults=faults,
        load=load,
        has_supervisor=has_kills and rng.random() < 0.5,
        forwards_requests=True,
        kept_leases=1.0 if is_tight else 1.5,
        max_starvation_seconds=6.0,
        # A gateway that forwards its client keeps its claims for 2 s (R20, claims).
        max_ownerless_seconds=3.0 + (layout.lease_seconds if has_kills else 0.0),
    )


def _one_route(layout: Layout) -> tuple[Span, ...]:
    """Return one server of each span of the layout's first route."""
    route: list[Span] = []
    for span in layout.spans:
        if span[0] == (route[-1][1] if route else 0):
            route.append(span)
    return tuple(route)


def islands(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways lose all links, often for longer than a lease, and get them again; some of their clients leave."""
    scenario = _small(adoptions(scenario, rng), rng)
    spans = tuple(dict.fromkeys(scenario.layout.spans)) * rng.choice((1, 2))
    layout = replace(scenario.layout, spans=spans, lease_seconds=0.5)
    conditions = _without_spikes(scenario)
    weights = {"isolate_gateway": 1.0, "kill_gateway": rng.choice((0.0, 0.5))}
    faults = replace(
        scenario.faults, weights=weights, mean_gap=0.3, burst_chance=0.0, max_count=8, until=5.0
    )
    load = replace(scenario.load, rewind_chance=0.6, turns=rng.randint(3, 5))
    return replace(
        scenario,
        layout=layout,
        conditions=conditions,
        faults=faults,
        load=load,
        return_seconds=1.0,
        max_wait_seconds=30.0,
    )


def detours(scenario: Scenario, rng: random.Random) -> Scenario:
    """A gateway loses all links once, in long turns. Servers beside its routes may be the first ones back.

    All links are back within the 0.3 s for which the ownership check waits (R19, leases).
    """
    scenario = islands(scenario, rng)
    layout = scenario.layout
    cut = rng.randrange(layout.n_blocks)
    route = ((0, cut), (cut, layout.n_blocks)) if cut else ((0, layout.n_blocks),)
    layout = replace(layout, spans=route * 2)
    conditions = replace(scenario.conditions, dial_seconds=0.1, slow_link_down_chance=0.0)
    load = replace(
        scenario.load, sessions=4, max_tokens=(30, 60), slow_reader_chance=1.0, read_seconds=0.05
    )
    faults = replace(scenario.faults, weights={"isolate_gateway": 1.0}, mean_gap=1.0, max_count=1)
    return replace(scenario, layout=layout, conditions=conditions, load=load, faults=faults)


def returns(scenario: Scenario, rng: random.Random) -> Scenario:
    """As `detours`, up to six times. Links are lost at different times, and come back within seconds, one by one."""
    scenario = detours(scenario, rng)
    conditions = replace(scenario.conditions, dial_seconds=1.0, slow_link_down_chance=0.5)
    faults = replace(scenario.faults, max_count=6)
    return replace(scenario, conditions=conditions, faults=faults, forwards_requests=True)


def _without_spikes(scenario: Scenario) -> Conditions:
    """Return the conditions without slow messages and slow steps: no server is late but by a fault."""
    return replace(scenario.conditions, spike_chance=0.0, slow_step_chance=0.0)


def _small(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the world with few sessions, whose slow readers are in a turn most of the time."""
    load = replace(
        scenario.load,
        sessions=rng.randint(1, 2),
        turns=rng.randint(2, 4),
        max_tokens=(10, 40),
        slow_reader_chance=0.7,
        read_seconds=rng.choice((0.02, 0.05)),
        quit_chance=0.0,
        close_chance=0.05,
    )
    return replace(scenario, load=load)
