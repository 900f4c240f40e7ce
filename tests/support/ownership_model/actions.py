"""Transitions of the whole ownership model: deliveries, steps, turns of clients, and faults of the environment.

`successors` returns every (label, state) that one event leads to. Used by the explorer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from support.ownership_model import gateway as gw
from support.ownership_model import server as sv
from support.ownership_model.invariants import fault_of_token
from support.ownership_model.state import (
    ACK,
    BACK,
    BULK,
    FENCING,
    HELD,
    INFO,
    INPUT,
    LATER,
    LIVE,
    NO_EPOCH,
    NO_GATEWAY,
    NONE,
    NOW,
    PARKED,
    REPORT,
    RUNNING,
    TOKEN,
    Epoch,
    Gateway,
    Hop,
    Log,
    Message,
    Rules,
    Server,
    State,
    World,
    lane_of,
    put,
)

Event: TypeAlias = tuple[str, State]
Events: TypeAlias = Iterator[Event]

TOKEN_BASE = 100  # tokens are above it, entries of prompts below


def successors(state: State, world: World) -> Events:
    """Return every event that is possible, without those that a bound of the world cuts off."""
    for g, each in enumerate(state.gateways):
        if each.alive and not each.frozen:
            yield from _deliver_to_gateway(state, world, g)
            yield from _gateway_events(state, world, g)
            yield from _client_events(state, world, g)
    for s, server in enumerate(state.servers):
        if server.alive:
            yield from _deliver_to_server(state, world, s)
    yield from _sample(state, world)
    yield from _faults(state, world)


def is_within(state: State, world: World) -> bool:
    """True if the state respects the bounds of the world."""
    return sum(map(len, state.lanes)) <= world.max_messages and all(
        each.epoch[0] <= world.max_epoch for each in state.gateways
    )


# ---- what a process sends


def context(state: State, world: World, g: int) -> gw.Context:
    return gw.Context(world, g, tuple(s.alive and s.linked[g] for s in state.servers))


def with_outcome(state: State, world: World, g: int, outcome: gw.Outcome) -> State:
    """Return the state after a transition of a gateway: what it sends is put on its lanes."""
    after, sends = outcome
    lanes = list(state.lanes)
    for s, message in sends:
        if state.servers[s].alive and state.servers[s].linked[g]:
            lane = lane_of(world, g, s, BULK if message.kind == INPUT else LIVE)
            lanes[lane] = (*lanes[lane], message)
    return state._replace(gateways=put(state.gateways, g, after), lanes=tuple(lanes))


def _with_server(state: State, world: World, s: int, result: sv.Result) -> State:
    after, answers = result
    lanes = list(state.lanes)
    for g, message in answers:
        if g != NO_GATEWAY and state.gateways[g].alive and after.linked[g]:
            lane = lane_of(world, g, s, BACK)
            lanes[lane] = (*lanes[lane], message)
    return state._replace(servers=put(state.servers, s, after), lanes=tuple(lanes))


def _apply(
    state: State, world: World, g: int, label: str, outcomes: Iterable[gw.Outcome]
) -> Events:
    for outcome in outcomes:
        yield f"{label}(g{g})", with_outcome(state, world, g, outcome)


# ---- deliveries


def _deliver_to_server(state: State, world: World, s: int) -> Events:
    for g in range(world.n_gateways):
        for lane in (LIVE, BULK):
            index = lane_of(world, g, s, lane)
            if state.lanes[index]:
                message, *rest = state.lanes[index]
                taken = state._replace(lanes=put(state.lanes, index, tuple(rest)))
                result = sv.receive(state.servers[s], g, message, world.rules)
                yield f"{message.kind}(g{g}>s{s})", _with_server(taken, world, s, result)


def _deliver_to_gateway(state: State, world: World, g: int) -> Events:
    for s in range(world.n_servers):
        index = lane_of(world, g, s, BACK)
        if state.lanes[index]:
            message, *rest = state.lanes[index]
            taken = state._replace(lanes=put(state.lanes, index, tuple(rest)))
            label = (
                f"{message.kind}{'' if message.kind != ACK else '-' + message.answer}(s{s}>g{g})"
            )
            for outcome in _answer(state.gateways[g], context(state, world, g), s, message):
                after = with_outcome(taken, world, g, outcome)
                if message.kind == TOKEN and outcome[0].log != state.gateways[g].log:
                    after = _with_read_log(state, after, g)
                yield label, after


def _answer(g: Gateway, at: gw.Context, s: int, message: Message) -> Iterable[gw.Outcome]:
    if message.kind == ACK:
        return gw.on_ack(g, at, s, message)
    if message.kind == INFO:
        return gw.on_info(g, at, s, message)
    if message.kind == TOKEN:
        return (gw.on_token(g, at, s, message),)
    assert message.kind == REPORT
    return gw.on_report(g, at, message)


def _with_read_log(before: State, after: State, g: int) -> State:
    """The client has read a token: the state knows the log that must not be lost, and the servers that have it."""
    log = after.gateways[g].log
    holders = tuple(
        server.alive and server.hop is not None and server.hop.durable[: len(log)] == log
        for server in after.servers
    )
    return after._replace(read=log, holders=holders, fault=fault_of_token(before, g))


# ---- steps of the servers


def _sample(state: State, world: World) -> Events:
    """The tail samples one token of an epoch, if every hop of the route runs it and has the log."""
    servers = range(world.n_servers)
    routes = [tuple(servers)] if world.pipeline else [(s,) for s in servers]
    for route in routes:
        hops = [state.servers[s].hop for s in route if state.servers[s].alive]
        ready = [hop for hop in hops if hop is not None and _is_ready(hop)]
        tail = ready[-1] if ready else None
        if tail is None or len(ready) < len(route) or len({hop.epoch for hop in ready}) > 1:
            continue
        token = TOKEN_BASE + 10 * tail.epoch[0] + tail.epoch[1]
        for is_last in (False, True):
            after = state
            for s in route:
                hop = state.servers[s].hop
                assert hop is not None
                server = state.servers[s]._replace(hop=hop._replace(log=(*hop.log, token)))
                message = Message(TOKEN, hop.epoch, length=len(hop.log), log=(token,), flag=is_last)
                answers = ((hop.owner, message),) if s == route[-1] else ()
                after = _with_server(after, world, s, (server, answers))
            yield f"sample{'-last' if is_last else ''}(s{route[-1]})", after


def _is_ready(hop: Hop) -> bool:
    return hop.phase == RUNNING and len(hop.log) == hop.length


# ---- a gateway and its clients


def _gateway_events(state: State, world: World, g: int) -> Events:
    """Deadlines: a question that was not answered, a held session that tries again, a Fence without an answer."""
    mine, at = state.gateways[g], context(state, world, g)
    if mine.query is not None and mine.query.waiting:
        missing = [s for s, awaited in enumerate(mine.query.unanswered) if awaited]
        is_slow = world.slow_answers or not any(at.linked[s] for s in missing)
        if mine.state in (HELD, FENCING) and is_slow:
            yield from _apply(state, world, g, "end_wait", gw.end_wait(mine, at))
    elif mine.state == HELD and gw.routes(mine, at) != [None]:
        yield from _apply(state, world, g, "retry", gw.enter_loop(mine, at))
    if mine.state == FENCING and state.budget.timeouts:
        late = tuple(v is not None and not v.lost and not v.fenced for v in mine.views)
        spent = state._replace(budget=state.budget._replace(timeouts=state.budget.timeouts - 1))
        faulty = mine._replace(recovering=mine.has_run or mine.recovering)
        yield from _apply(spent, world, g, "fence_timeout", gw.enter_loop(faulty, at, late))


def _client_events(state: State, world: World, g: int) -> Events:
    mine = state.gateways[g]
    if mine.state == NONE:
        yield from _search(state, world, g)
    elif mine.state == PARKED and state.budget.turns:
        yield from _begin(state, world, g)


def _begin(state: State, world: World, g: int) -> Events:
    """A client resumes the turn or continues the session; or it edits the log."""
    mine, at = state.gateways[g], context(state, world, g)
    turn = world.budget.turns - state.budget.turns + 1
    spent = state._replace(budget=state.budget._replace(turns=state.budget.turns - 1))
    if mine.log:
        yield from _apply(spent, world, g, "resume", gw.begin_turn(mine, at, mine.log))
    if world.edits or not mine.log:
        if mine.log[: len(state.read)] == state.read:
            spent = spent._replace(read=(), holders=(False,) * world.n_servers)
        yield from _apply(spent, world, g, "edit", gw.begin_turn(mine, at, (turn,)))


def _search(state: State, world: World, g: int) -> Events:
    """A client asks a gateway without the session. It asks all servers at once, and fetches the log."""
    if not state.budget.turns:
        return
    at = context(state, world, g)
    alive = [s for s in range(world.n_servers) if state.servers[s].alive]
    asked = [s for s in alive if at.linked[s]]
    if not asked or (world.rules.searches_all and asked != alive):
        return
    if len(alive) < world.n_servers and any(state.lanes):
        return  # a server that was lost a moment ago is waited for
    claimants = [(s, state.servers[s].claimant) for s in asked]
    if world.rules.claims_names and any(
        other not in (NO_GATEWAY, g) and state.servers[s].linked[other] for s, other in claimants
    ):
        return
    found = locate(state, world.rules, g, asked)
    if found is None:
        return
    above, run, log, hops = found
    servers = state.servers
    for s in asked if world.rules.claims_names else ():
        servers = put(servers, s, servers[s]._replace(claimant=g))
    claimed = state._replace(servers=servers)
    mine = state.gateways[g]
    if log:
        taken = gw.take_over(mine, at, above, run, log, hops)
        yield from _apply(claimed, world, g, "take_over", (taken,))
    else:
        turn = world.budget.turns - state.budget.turns + 1
        spent = claimed._replace(budget=state.budget._replace(turns=state.budget.turns - 1))
        opened = gw.open_session(mine, at, above, (turn,))
        yield from _apply(spent, world, g, "open", opened)


def locate(
    state: State, rules: Rules, me: int, asked: Iterable[int]
) -> tuple[int, Epoch, Log, dict[int, int]] | None:
    """Return (highest counter, last epoch that ran, log, hops that followed it) as `locate_session` chooses them.

    None while an owner is alive, or while the lease of one still runs. An empty log: none is found.
    """
    answers = {s: hop for s in asked if (hop := state.servers[s].hop) is not None}
    above = max((hop.epoch[0] for hop in answers.values()), default=0)
    nothing: tuple[int, Epoch, Log, dict[int, int]] = above, NO_EPOCH, (), {}
    held = {s: hop for s, hop in answers.items() if hop.owner != me}
    silent = [is_silent(state.servers[s], hop.owner) for s, hop in held.items()]
    linked = [state.servers[s].linked[hop.owner] for s, hop in held.items()]
    if any(up and not quiet for up, quiet in zip(linked, silent, strict=True)):
        return None
    if rules.waits_for_lease and not all(silent):
        return None
    if not held or max(answers.values(), key=lambda hop: hop.rank).owner == me:
        return nothing
    for run in sorted({hop.run for hop in held.values()}, reverse=True):
        parts = {s: hop for s, hop in held.items() if run in (hop.run, hop.epoch)}
        logs = [(len(hop.durable), hop.epoch, hop.durable) for hop in parts.values() if hop.durable]
        if logs and run != NO_EPOCH:
            log = max(logs)[2]
            return (
                (above, run, log, {s: len(hop.log) for s, hop in parts.items()})
                if all(silent)
                else None
            )
    return nothing


def is_silent(server: Server, gateway: int) -> bool:
    return gateway == NO_GATEWAY or server.lapsed[gateway]


# ---- the environment


def _faults(state: State, world: World) -> Events:
    budget = state.budget
    for g in range(world.n_gateways):
        if state.gateways[g].alive:
            yield from _gateway_faults(state, world, g)
        for s in range(world.n_servers):
            if state.servers[s].alive:
                yield from _link_events(state, world, g, s)
    for s, server in enumerate(state.servers):
        if not server.alive:
            continue
        if budget.crashes:
            spent = state._replace(budget=budget._replace(crashes=budget.crashes - 1))
            yield from _crash(spent, world, s)
        if budget.grants and server.hop is not None and not server.hop.was_started:
            spent = state._replace(budget=budget._replace(grants=budget.grants - 1))
            yield f"ungrant(s{s})", _with_server(spent, world, s, sv.free_unstarted(server))


def _gateway_faults(state: State, world: World, g: int) -> Events:
    mine, budget = state.gateways[g], state.budget
    if mine.frozen:
        yield from _apply(state, world, g, "wake", gw.wake(mine, context(state, world, g)))
    elif budget.stalls and mine.state != NONE:
        frozen = put(state.gateways, g, mine._replace(frozen=True))
        budget = budget._replace(stalls=budget.stalls - 1)
        yield f"stall(g{g})", state._replace(gateways=frozen, budget=budget)
    budget = state.budget
    if budget.kills and mine.state != NONE:
        spent = state._replace(budget=budget._replace(kills=budget.kills - 1))
        for s in range(world.n_servers):
            spent = _drop_lanes(spent, world, g, s)
        servers = tuple(sv.disconnect(server, g) for server in spent.servers)
        dead = Gateway(views=(None,) * world.n_servers, closing=(NO_EPOCH,) * world.n_servers)
        gateways = put(spent.gateways, g, dead._replace(alive=False))
        yield f"kill(g{g})", spent._replace(servers=servers, gateways=gateways)


def _link_events(state: State, world: World, g: int, s: int) -> Events:
    server, mine, budget = state.servers[s], state.gateways[g], state.budget
    is_up = server.linked[g]
    if mine.alive and not mine.frozen and is_up and budget.cuts:
        spent = state._replace(budget=budget._replace(cuts=budget.cuts - 1))
        yield from _cut(spent, world, g, s)
    if mine.alive and not mine.frozen and not is_up:
        linked = state._replace(servers=put(state.servers, s, sv.connect(server, g)))
        outcomes = gw.on_connected(mine, context(linked, world, g), s)
        for outcome in outcomes:
            yield f"link(g{g},s{s})", with_outcome(linked, world, g, outcome)
    owns = server.hop is not None and server.hop.owner == g
    is_silent_now = (not mine.alive or mine.frozen or not is_up) and _is_calm(state, world)
    if owns and is_silent_now and not server.lapsed[g] and budget.expiries:
        yield f"expire(g{g},s{s})", _expire(state, g, s)
    if server.lapsed[g] and is_up and mine.alive and not mine.frozen:
        heard = put(state.servers, s, sv.end_lapse(server, g))
        yield f"heartbeat(g{g}>s{s})", state._replace(servers=heard)
    if server.claimant == g and _is_claim_old(state, world, g):
        freed = put(state.servers, s, server._replace(claimant=NO_GATEWAY))
        yield f"claim_ends(g{g},s{s})", state._replace(servers=freed)


def _is_calm(state: State, world: World) -> bool:
    """True if no message is on its way, but to a frozen gateway: none takes as long as a lease."""
    for g, mine in enumerate(state.gateways):
        lanes = [LIVE] if mine.frozen else [LIVE, BACK]
        lanes += [] if world.slow_prompts else [BULK]
        for s in range(world.n_servers):
            if any(state.lanes[lane_of(world, g, s, lane)] for lane in lanes):
                return False
    return True


def _expire(state: State, g: int, s: int) -> State:
    """A lease ends. A gateway that is cut off for so long has been held for half a lease."""
    server, mine, budget = state.servers[s], state.gateways[g], state.budget
    lapsed = put(state.servers, s, server._replace(lapsed=put(server.lapsed, g, True)))
    if mine.query is not None and mine.query.due == LATER:
        mine = mine._replace(query=mine.query._replace(due=NOW))
    return state._replace(
        servers=lapsed,
        gateways=put(state.gateways, g, mine),
        budget=budget._replace(expiries=budget.expiries - 1),
    )


def _is_claim_old(state: State, world: World, g: int) -> bool:
    """True once the claimant's Fences are answered: a claim of 2 s lasts longer than that."""
    lanes = [lane_of(world, g, s, LIVE) for s in range(world.n_servers)]
    return state.gateways[g].state not in (FENCING, HELD) and not any(
        state.lanes[lane] for lane in lanes
    )


def _cut(state: State, world: World, g: int, s: int) -> Events:
    cut = _drop_lanes(state, world, g, s)
    cut = cut._replace(servers=put(cut.servers, s, sv.disconnect(cut.servers[s], g)))
    for outcome in gw.on_lost(cut.gateways[g], context(cut, world, g), s):
        yield f"cut(g{g},s{s})", with_outcome(cut, world, g, outcome)


def _crash(state: State, world: World, s: int) -> Events:
    """A server ends, and its gateways lose their links to it one after the other."""
    up = state.servers[s].linked
    down = Server((False,) * world.n_gateways, (False,) * world.n_gateways, alive=False)
    states = [state._replace(servers=put(state.servers, s, down))]
    for g, mine in enumerate(state.gateways):
        states = [_drop_lanes(each, world, g, s) for each in states]
        if mine.alive and up[g]:
            states = [
                with_outcome(each, world, g, outcome)
                for each in states
                for outcome in gw.on_lost(each.gateways[g], context(each, world, g), s)
            ]
    for each in states:
        yield f"crash(s{s})", each


def _drop_lanes(state: State, world: World, g: int, s: int) -> State:
    lanes = state.lanes
    for lane in (LIVE, BULK, BACK):
        lanes = put(lanes, lane_of(world, g, s, lane), ())
    return state._replace(lanes=lanes)
