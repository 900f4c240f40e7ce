"""Transitions of a gateway in the ownership model, after the recovery loop and the ownership check of the product.

A transition yields its possible outcomes: more than one where the product's choice depends on costs or on time. The
rules of R20 (ownership) at a gateway in `docs/protocol.md` are the specification.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from support.ownership_model.server import rank_of
from support.ownership_model.state import (
    CLOSE,
    FENCE,
    FENCING,
    FIND,
    GRANTED,
    HELD,
    INPUT,
    LATER,
    NEVER,
    NO_EPOCH,
    NO_LIMIT,
    NONE,
    NOW,
    OWNED,
    PARKED,
    RUNNING,
    STALE_EPOCH,
    START,
    UNKNOWN,
    Epoch,
    Flags,
    Gateway,
    Handle,
    Log,
    Message,
    Query,
    Rank,
    View,
    World,
    put,
)

Sends: TypeAlias = tuple[tuple[int, Message], ...]  # (server, message)
Outcome: TypeAlias = tuple[Gateway, Sends]
Outcomes: TypeAlias = Iterator[Outcome]


@dataclass(frozen=True, slots=True)
class Context:
    """The gateway's number and the links that it has."""

    world: World
    me: int
    linked: Flags

    def rank(self, gateway: Gateway) -> Rank:
        return rank_of(gateway.run, gateway.epoch, self.world.rules)


# ---- the recovery loop


def enter_loop(g: Gateway, at: Context, excluded: Flags = ()) -> Outcomes:
    """Raise the epoch, freeze the log, and fence every hop of a complete route."""
    g = truncate(g._replace(epoch=(g.epoch[0] + 1, at.me + 1)), len(g.log))
    g = g._replace(views=tuple(view and view._replace(fenced=False) for view in g.views))
    for route in routes(g, at, excluded):
        if route is None:
            yield _no_route(g, at)
            continue
        routed, closes = _set_route(g, at, route)
        if _creates_unanswered(routed, at):
            yield _hold(routed, at), closes
            continue
        asked, finds = _ask_if_due(routed, at)
        if asked.query is not None and asked.query.waiting:
            yield asked._replace(state=HELD), closes + finds
        else:
            fenced, fences = _fence_route(asked._replace(state=FENCING), at)
            yield fenced, closes + finds + fences


def routes(g: Gateway, at: Context, excluded: Flags = ()) -> list[tuple[int, ...] | None]:
    """Return the possible routes; None if there is none."""
    servers = range(at.world.n_servers)
    usable = [s for s in servers if at.linked[s] and not (excluded and excluded[s])]
    if at.world.pipeline:
        return [tuple(servers)] if len(usable) == at.world.n_servers else [None]
    avoided = _unanswered(g)
    better = [s for s in usable if not (avoided and avoided[s])] or usable
    kept = [s for s in usable if (view := g.views[s]) is not None and not view.lost]
    chosen: list[tuple[int, ...] | None] = [(s,) for s in kept or better]
    return chosen or [None]


def _unanswered(g: Gateway) -> Flags:
    query = g.query
    return () if query is None or query.waiting or not query.asked else query.unanswered


def _creates_unanswered(g: Gateway, at: Context) -> bool:
    missing = _unanswered(g)
    return at.world.rules.waits_for_answer and any(
        view is not None and not view.lost and view.handle is None and missing and missing[s]
        for s, view in enumerate(g.views)
    )


def _set_route(g: Gateway, at: Context, route: tuple[int, ...]) -> Outcome:
    """Attach the hops of the route, detach all others. Those that may have the last log are kept until it has run."""
    sends: Sends = ()
    views, closing = g.views, g.closing
    for s, view in enumerate(views):
        if s in route:
            if view is None:
                view = View(created=closing[s])
            views = put(views, s, view._replace(lost=False))
            closing = put(closing, s, NO_EPOCH)
        elif view is not None and not view.lost:
            if view.handle is not None and at.linked[s] and at.world.rules.keeps_replaced_hops:
                views = put(views, s, view._replace(lost=True))
                continue
            kept, closing, closes = _detach(view, s, at, closing)
            views, sends = put(views, s, kept), sends + closes
    return g._replace(views=views, closing=closing), sends


def _detach(
    view: View, s: int, at: Context, closing: tuple[Epoch, ...], *, relinquished: bool = False
) -> tuple[View | None, tuple[Epoch, ...], Sends]:
    if not at.linked[s]:
        is_kept = view.handle is not None and at.world.rules.keeps_lost_hops
        return view._replace(lost=True) if is_kept else None, closing, ()
    if view.handle is not None:
        return None, closing, ((s, Message(CLOSE, handle=view.handle, flag=relinquished)),)
    return None, put(closing, s, view.created), ()


def _no_route(g: Gateway, at: Context) -> Outcome:
    """Refuse a turn that has not started; hold one that has."""
    if g.recovering or g.held:
        return _hold(g, at), ()
    if not g.has_run:
        return close_hops(g._replace(state=PARKED), at)
    views = tuple(
        None if view is not None and view.handle is None and not view.lost else view
        for view in g.views
    )
    return park(g._replace(views=views), at)


def _hold(g: Gateway, at: Context) -> Gateway:
    """Hold the session. Only the first hold since the last token counts the half lease until the question is due."""
    if not g.held:
        g = require(g, at, LATER if _has_owner(g, at) else NOW)
        if g.query is not None:
            held = tuple(view is not None for view in g.views)
            g = g._replace(query=g.query._replace(route=held))
    return g._replace(state=HELD, held=True)


def park(g: Gateway, at: Context) -> Outcome:
    """Fence without StartEpoch."""
    g = truncate(g._replace(epoch=(g.epoch[0] + 1, at.me + 1), state=PARKED), len(g.log))
    sends: Sends = ()
    for s, view in enumerate(g.views):
        if view is not None and not view.lost:
            g = g._replace(views=put(g.views, s, view._replace(fenced=False)))
            if at.linked[s] and view.handle is not None:
                sends += ((s, _fence(g, view)),)
    return g, sends


def truncate(g: Gateway, kept: int) -> Gateway:
    views = tuple(view and view._replace(cut=min(view.cut, kept)) for view in g.views)
    return g._replace(views=views)


def _fence_route(g: Gateway, at: Context, *, only_new: bool = False) -> Outcome:
    """Fence the hops of the route. `only_new`: those that have neither a handle nor a create on its way."""
    sends: Sends = ()
    for s, view in enumerate(g.views):
        if view is None or view.lost:
            continue
        if only_new and (view.handle is not None or view.created != NO_EPOCH):
            continue
        sends += ((s, _fence(g, view)),)
        if view.handle is None:
            g = g._replace(views=put(g.views, s, view._replace(created=g.epoch)))
    return g, sends


def _fence(g: Gateway, view: View) -> Message:
    return Message(FENCE, g.epoch, view.handle, g.run, min(view.cut, len(g.log)))


def close_hops(g: Gateway, at: Context, *, relinquished: bool = False) -> Outcome:
    sends: Sends = ()
    closing = g.closing
    for s, view in enumerate(g.views):
        if view is not None:
            _, closing, closes = _detach(view, s, at, closing, relinquished=relinquished)
            sends += closes
    return g._replace(views=(None,) * len(g.views), closing=closing), sends


def relinquish(g: Gateway, at: Context, *, is_outranked: bool) -> Outcome:
    """Leave the session to another gateway and forget it."""
    left = is_outranked and at.world.rules.relinquishes
    g, sends = close_hops(g, at, relinquished=left)
    return forget(g), sends


def forget(g: Gateway) -> Gateway:
    views = (None,) * len(g.views)
    return Gateway(views=views, closing=g.closing, counter=max(g.counter, g.epoch[0]))


# ---- the ownership check


def _has_owner(g: Gateway, at: Context) -> bool:
    """Return whether a linked server has a hop of it."""
    return any(
        v is not None and v.handle is not None and at.linked[s] for s, v in enumerate(g.views)
    )


def require(g: Gateway, at: Context, due: int) -> Gateway:
    if not at.world.rules.asks_after_cut:
        return g
    if g.query is None:
        return g._replace(
            query=Query(g.run if g.run != NO_EPOCH else g.found, due, (False,) * len(g.views))
        )
    return g._replace(query=g.query._replace(due=max(due, g.query.due)))


def _ask_if_due(g: Gateway, at: Context) -> Outcome:
    query = g.query
    if query is None or query.due != NOW:
        return g, ()
    missing = tuple(r or up for r, up in zip(query.route, at.linked, strict=True))
    query = query._replace(due=LATER, asked=True, waiting=any(missing), unanswered=missing)
    return g._replace(query=query), _finds(at.linked)


def _ask_again(g: Gateway, servers: Flags) -> Outcome:
    query = g.query
    if query is None or not query.asked:
        return g, ()
    missing = tuple(a or b for a, b in zip(query.unanswered, servers, strict=True))
    return g._replace(query=query._replace(unanswered=missing)), _finds(servers)


def _finds(servers: Flags) -> Sends:
    return tuple((s, Message(FIND)) for s, asked in enumerate(servers) if asked)


def on_info(g: Gateway, at: Context, s: int, found: Message) -> Outcomes:
    query = g.query
    if g.state == NONE or query is None:
        yield g, ()
        return
    missing = put(query.unanswered, s, False) if query.unanswered else ()
    was_waiting = query.waiting
    query = query._replace(unanswered=missing, waiting=was_waiting and any(missing))
    g = g._replace(query=query)
    theirs = rank_of(found.run, found.epoch, at.world.rules)
    ran_elsewhere = found.run > query.run and found.run[1] != at.me + 1
    if found.flag and found.owner != at.me and (ran_elsewhere or theirs > at.rank(g)):
        yield relinquish(g, at, is_outranked=theirs > at.rank(g))
    elif was_waiting and not query.waiting and g.state == HELD:
        yield from enter_loop(g, at)
    elif was_waiting and not query.waiting and g.state == FENCING:
        yield _fence_route(g, at, only_new=True)
    else:
        yield g, ()


def end_wait(g: Gateway, at: Context) -> Outcomes:
    """The answers have not all come in time: the session goes on without those that are missing."""
    assert g.query is not None
    return enter_loop(g._replace(query=g.query._replace(waiting=False)), at)


# ---- links


def on_lost(g: Gateway, at: Context, s: int) -> Outcomes:
    view = g.views[s]
    g = g._replace(closing=put(g.closing, s, NO_EPOCH))
    if view is not None:
        g = g._replace(views=put(g.views, s, view._replace(created=NO_EPOCH)))
        if g.state == PARKED or not _has_owner(g, at):
            g = require(g, at, NOW)
    if view is None or view.lost or g.state in (NONE, HELD, PARKED):
        yield g, ()
    else:
        yield from enter_loop(g._replace(recovering=True), at)


def on_connected(g: Gateway, at: Context, s: int) -> Outcomes:
    view = g.views[s]
    handles: tuple[Handle, ...] = ()
    if view is not None and view.handle is not None:
        handles = (view.handle,)
    sends: Sends = ((s, Message(OWNED, handles=handles)),)
    g, finds = _ask_again(g, tuple(each == s for each in range(len(g.views))))
    sends += finds
    if g.state != HELD:
        yield g, sends
        return
    for entered, more in enter_loop(g, at):
        yield entered, sends + more


def wake(g: Gateway, at: Context) -> Outcomes:
    """A stall of more than half a lease has ended: every session enters the recovery loop before anything else."""
    g = g._replace(frozen=False)
    if g.state == NONE:
        yield g, ()
        return
    g = require(g, at, NOW)
    if g.is_in_turn and g.state != HELD:
        yield from enter_loop(g._replace(recovering=True), at)
    else:
        yield g, ()


# ---- answers


def on_ack(g: Gateway, at: Context, s: int, ack: Message) -> Outcomes:
    view = g.views[s]
    if view is None or view.lost:
        g, sends = _on_closing_ack(g, s, ack)
        if ack.answer == UNKNOWN:
            g, sends = _ask_again(g, at.linked)
        yield g, sends
        return
    if ack.epoch < view.seen:
        yield g, ()
        return
    if ack.handle is not None:
        view = view._replace(handle=ack.handle, seen=ack.epoch)
    if ack.epoch == view.created:
        view = view._replace(created=NO_EPOCH)
    g = g._replace(views=put(g.views, s, view))
    finds: Sends = ()
    if ack.answer == UNKNOWN:
        g, finds = _ask_again(g, at.linked)
    if ack.epoch != g.epoch or view.fenced:
        yield g, finds
    elif ack.answer == UNKNOWN:
        g, more = _on_unknown(g, at, s)
        yield g, finds + more
    elif ack.answer == STALE_EPOCH:
        yield from _on_stale(g, at, s, ack)
    else:
        yield _on_granted(g, at, s, ack)


def _on_closing_ack(g: Gateway, s: int, ack: Message) -> Outcome:
    if g.closing[s] == NO_EPOCH:
        return g, ()
    if ack.answer == GRANTED:
        return g._replace(closing=put(g.closing, s, NO_EPOCH)), (
            (s, Message(CLOSE, handle=ack.handle)),
        )
    if ack.epoch == g.closing[s]:
        g = g._replace(closing=put(g.closing, s, NO_EPOCH))
    return g, ()


def _on_unknown(g: Gateway, at: Context, s: int) -> Outcome:
    g = _forget_hop(g, s)
    if g.state != FENCING:
        return g, ()
    g, finds = _ask_if_due(require(g, at, NOW), at)
    if g.query is not None and g.query.waiting:
        return g, finds
    g, fences = _fence_route(g, at, only_new=True)
    return g, finds + fences


def _on_stale(g: Gateway, at: Context, s: int, ack: Message) -> Outcomes:
    """The lower rank lets go at once; the higher one retries until its time is over."""
    g = _forget_hop(g, s)
    assert ack.rank is not None
    if rank_of(*ack.rank, at.world.rules) >= at.rank(g):
        yield relinquish(g, at, is_outranked=True)
        return
    if g.contested:
        yield relinquish(g, at, is_outranked=False)
    g = g._replace(contested=True)
    yield (_hold(g, at) if g.state == FENCING else g), ()


def _forget_hop(g: Gateway, s: int) -> Gateway:
    view = g.views[s]
    assert view is not None
    return g._replace(views=put(g.views, s, View(cut=view.cut, seen=g.epoch)))


def _on_granted(g: Gateway, at: Context, s: int, ack: Message) -> Outcome:
    view = g.views[s]
    assert view is not None
    view = view._replace(fenced=True, cut=NO_LIMIT, length=ack.length)
    g = g._replace(views=put(g.views, s, view), run=max(g.run, ack.run))
    if g.state != FENCING:
        return g, ()
    hops = [(s, hop) for s, hop in enumerate(g.views) if hop is not None and not hop.lost]
    if not all(hop.fenced for _, hop in hops):
        return g, ()
    sends: Sends = ()
    for s, hop in hops:
        have = min(hop.length, len(g.log))
        sends += ((s, Message(START, g.epoch, hop.handle, length=len(g.log))),)
        if g.log[have:]:
            sends += ((s, Message(INPUT, g.epoch, hop.handle, length=have, log=g.log[have:])),)
    query = g.query
    if query is not None:
        query = query._replace(due=NEVER) if query.asked else None
    run = g.run if at.world.rules.runs_by_token else g.epoch
    return g._replace(state=RUNNING, has_run=True, query=query, run=run), sends


def on_token(g: Gateway, at: Context, s: int, token: Message) -> Outcome:
    if g.state != RUNNING or token.epoch != g.epoch or token.length != len(g.log):
        return g, ()
    sends: Sends = ()
    views = g.views
    for each, view in enumerate(views):
        if view is not None and view.lost:
            views = put(views, each, None)
            if at.linked[each]:
                sends += ((each, Message(CLOSE, handle=view.handle)),)
    g = g._replace(
        log=g.log + token.log,
        run=g.epoch,
        views=views,
        recovering=False,
        contested=False,
        held=False,
        state=PARKED if token.flag else RUNNING,
    )
    return g, sends


def on_report(g: Gateway, at: Context, report: Message) -> Outcomes:
    if report.epoch != g.epoch or g.state not in (RUNNING, FENCING):
        yield g, ()
    else:
        yield from enter_loop(g._replace(recovering=True), at)


# ---- calls of the API


def begin_turn(g: Gateway, at: Context, tokens: Log) -> Outcomes:
    query = g.query
    if query is not None:
        query = None if query.due == NEVER else query._replace(due=NOW)
    common = _common_prefix(g.log, tokens)
    g = truncate(g, common)._replace(log=tokens, query=query)
    g = g._replace(contested=False, recovering=False, held=False)
    return enter_loop(g, at)


def open_session(g: Gateway, at: Context, above: int, prompt: Log) -> Outcomes:
    counter = max(above, g.counter)
    g = g._replace(epoch=(counter, at.me + 1), found=(counter + 1, 0), state=PARKED)
    return begin_turn(g, at, prompt)


def take_over(
    g: Gateway, at: Context, above: int, run: Epoch, log: Log, hops: dict[int, int]
) -> Outcome:
    """Open a session with the log and the hops that were found. `hops`: length of the log at each server."""
    g = g._replace(epoch=(max(above, g.counter) + 1, at.me + 1), run=run, log=log, has_run=True)
    closing = g.closing
    for s, length in hops.items():
        cut = min(length, len(log))
        g = g._replace(views=put(g.views, s, View(cut=cut)))
        closing = put(closing, s, NO_EPOCH)
    return _fence_route(g._replace(state=PARKED, closing=closing), at)


def _common_prefix(a: Log, b: Log) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length
