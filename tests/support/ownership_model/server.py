"""Transitions of a server in the ownership model; each returns the server after it and the answers.

The state table of R20 (ownership) in `docs/protocol.md` is the specification. `conformance.py` compares these functions
with the product's server core.
"""

from __future__ import annotations

from typing import TypeAlias

from support.ownership_model.state import (
    ACK,
    CLOSE,
    FENCE,
    FENCED,
    FIND,
    GRANTED,
    INFO,
    INPUT,
    NO_EPOCH,
    NO_GATEWAY,
    NO_LIMIT,
    OWNED,
    REPORT,
    RUNNING,
    STALE_EPOCH,
    START,
    STOPPED,
    UNKNOWN,
    Epoch,
    Hop,
    Message,
    Rank,
    Rules,
    Server,
    put,
)

Answers: TypeAlias = tuple[tuple[int, Message], ...]  # (gateway, message)
Result: TypeAlias = tuple[Server, Answers]

OWNER, TAKEN_OVER, REPLACED = "owner", "taken_over", "replaced"


def decide(server: Server, hop: Hop, peer: int, fence: Message, rules: Rules) -> str:
    """Return who gets the hop: a row of the state table, or STALE_EPOCH."""
    if peer == hop.owner:
        return OWNER
    has_owner = hop.owner != NO_GATEWAY
    has_lease = has_owner and not server.lapsed[hop.owner]
    is_linked = has_owner and server.linked[hop.owner]
    rank, held = rank_of(fence.run, fence.epoch, rules), rank_of(hop.run, hop.epoch, rules)
    is_leftover = fence.run > hop.run and not is_linked
    is_protected = hop.started_by_owner and not is_leftover and rules.lease_protects
    if has_lease and (rank <= held or is_protected):
        return STALE_EPOCH
    names_last_run = fence.run in (hop.run, hop.epoch) and fence.run != NO_EPOCH
    return TAKEN_OVER if fence.epoch > hop.epoch and names_last_run else REPLACED


def rank_of(run: Epoch, epoch: Epoch, rules: Rules) -> Rank:
    return (run if rules.rank_by_run else NO_EPOCH), epoch


def receive(server: Server, peer: int, message: Message, rules: Rules) -> Result:
    """Handle one message of a gateway."""
    server = end_lapse(server, peer)
    handler = HANDLERS[message.kind]
    return handler(server, peer, message, rules)


def end_lapse(server: Server, peer: int) -> Server:
    """A message of a gateway came after its lease had expired: its hop has lost its priority."""
    if not server.lapsed[peer]:
        return server
    hop = server.hop
    if hop is not None and hop.owner == peer:
        hop = hop._replace(started_by_owner=False)
    return server._replace(hop=hop, lapsed=put(server.lapsed, peer, False))


def connect(server: Server, peer: int) -> Server:
    server = end_lapse(server, peer)
    return server._replace(linked=put(server.linked, peer, True))


def disconnect(server: Server, peer: int) -> Server:
    return server._replace(linked=put(server.linked, peer, False))


def free_unstarted(server: Server) -> Result:
    """Free a hop that was not started in time."""
    hop = server.hop
    assert hop is not None
    return server._replace(hop=None), ((hop.owner, Message(REPORT, hop.epoch)),)


def _on_fence(server: Server, peer: int, fence: Message, rules: Rules) -> Result:
    hop = server.hop
    if fence.handle is not None and (
        hop is None or hop.handle != fence.handle or (rules.renews_handles and hop.owner != peer)
    ):
        return server, ((peer, Message(ACK, fence.epoch, answer=UNKNOWN)),)
    if hop is None:
        return _create(server, peer, fence)
    decision = decide(server, hop, peer, fence, rules)
    if decision == STALE_EPOCH:
        return server, ((peer, Message(ACK, fence.epoch, answer=STALE_EPOCH, rank=hop.rank)),)
    if decision == REPLACED and fence.handle is None:
        return _create(server, peer, fence)
    if decision != OWNER:
        handle = fence.epoch if rules.renews_handles else hop.handle
        hop = hop._replace(owner=peer, handle=handle, started_by_owner=False)
    if fence.epoch < hop.epoch:
        return server._replace(hop=hop), ()
    if fence.epoch == hop.epoch:
        answers = _grant(hop) if hop.phase == FENCED else ()
        return server._replace(hop=hop), answers
    kept = max(0, min(fence.length, hop.ran_log if rules.drops_unrun else NO_LIMIT))
    log = hop.log[:kept]
    hop = hop._replace(
        epoch=fence.epoch, run=max(hop.run, fence.run), phase=FENCED, log=log, ran_log=len(log)
    )
    return server._replace(hop=hop), _grant(hop)


def _create(server: Server, peer: int, fence: Message) -> Result:
    hop = Hop(peer, fence.epoch, fence.epoch, fence.run)
    return server._replace(hop=hop), _grant(hop)


def _grant(hop: Hop) -> Answers:
    """Acknowledge the cut: entries that came since are not part of a repeated answer."""
    ack = Message(ACK, hop.epoch, hop.handle, hop.counters, hop.ran_log, answer=GRANTED)
    return ((hop.owner, ack),)


def _on_start(server: Server, peer: int, start: Message, rules: Rules) -> Result:
    hop = server.hop
    is_owner = hop is not None and (hop.owner == peer or not rules.renews_handles)
    if hop is None or hop.handle != start.handle or not is_owner:
        return server, ((peer, Message(REPORT, start.epoch)),)
    if start.epoch != hop.epoch or hop.phase != FENCED:
        return server, ()
    hop = hop._replace(
        phase=RUNNING,
        was_started=True,
        started_by_owner=True,
        log=hop.log[: start.length],
        ran_log=NO_LIMIT if len(hop.log) >= start.length else hop.ran_log,
        run=max(hop.run, start.epoch),
        counters=start.epoch,
        length=start.length,
    )
    return server._replace(hop=hop), ()


def _on_input(server: Server, peer: int, entries: Message, rules: Rules) -> Result:
    hop = server.hop
    if (
        hop is None
        or (hop.handle, hop.epoch) != (entries.handle, entries.epoch)
        or hop.owner != peer
        or hop.phase == STOPPED
    ):
        return server, ()
    have = len(hop.log)
    if entries.length > have:
        hop = hop._replace(phase=STOPPED)
        return server._replace(hop=hop), ((peer, Message(REPORT, hop.epoch)),)
    hop = hop._replace(log=hop.log + entries.log[have - entries.length :])
    if hop.phase == RUNNING and len(hop.log) > have and len(hop.log) >= hop.length:
        hop = hop._replace(ran_log=NO_LIMIT)  # a part of a log must not hide an older one
    return server._replace(hop=hop), ()


def _on_close(server: Server, peer: int, close: Message, rules: Rules) -> Result:
    hop = server.hop
    if hop is None or hop.handle != close.handle or hop.owner != peer:
        return server, ()
    if not (close.flag and hop.was_started):
        return server._replace(hop=None), ()
    hop = hop._replace(owner=NO_GATEWAY, handle=None, started_by_owner=False, phase=FENCED)
    return server._replace(hop=hop), ()


def _on_owned(server: Server, peer: int, owned: Message, rules: Rules) -> Result:
    hop = server.hop
    if hop is None or hop.owner != peer or hop.handle in owned.handles:
        return server, ()
    return server._replace(hop=None), ((peer, Message(REPORT, hop.epoch)),)


def _on_find(server: Server, peer: int, find: Message, rules: Rules) -> Result:
    return server, ((peer, info(server)),)


def info(server: Server) -> Message:
    """Return the SessionInfo, with the length of the log that the next cut keeps."""
    hop = server.hop
    if hop is None:
        return Message(INFO)
    return Message(
        INFO, hop.epoch, run=hop.run, length=len(hop.durable), owner=hop.owner, flag=True
    )


HANDLERS = {
    FENCE: _on_fence,
    START: _on_start,
    INPUT: _on_input,
    CLOSE: _on_close,
    OWNED: _on_owned,
    FIND: _on_find,
}
