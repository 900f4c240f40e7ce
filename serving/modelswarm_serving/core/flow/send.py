"""What a running hop sends: rows to its successor, tokens to gateway and head.

Called by `server.py` after a step and when a window comes. Plans nothing; computed rows are within the successor's
window because they were planned so, kept ones because they are sent as far as it reaches.
"""

from __future__ import annotations

from dataclasses import replace

from modelswarm.protocol.messages import Finish, Go, Lane, Rows, Token, Trouble
from modelswarm_serving.core.hops.hop import Fault, Hop
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.replay_log import ReplayLog
from modelswarm_serving.model.base import Picked

BULK_GROUP_BYTES = 256 * 1024
"""A control message never waits for longer than this on a shared wire; frames stay under 4 MiB."""


def kept_fault(log: ReplayLog, hop: Hop, go: Go) -> Fault | None:
    """Are the rows that this Go wants of the replay log still there?"""
    if hop.is_tail or go.send_from >= go.start:
        return None
    start, end = log.run(hop.handle)
    if start <= go.send_from and go.start <= end:
        return None
    return Fault(Trouble.GAP, f"rows {go.send_from} to {go.start} are not kept here")


def send_kept(out: Outbox, hop: Hop, log: ReplayLog, row_bytes: int) -> Fault | None:
    """Kept rows [sent, start) on bulk, as far as the successor's window reaches (R6).

    They are out before the first computed row: none is computed beyond that window.
    """
    go = hop.go
    if go is None or go.successor is None or hop.sent >= go.start:
        return None
    to, step = go.successor, max(1, BULK_GROUP_BYTES // row_bytes)
    end = min(go.start, hop.window)
    while hop.sent < end:
        count = min(step, end - hop.sent)
        rows = log.take(hop.handle, hop.sent, hop.sent + count)
        if rows is None:
            return Fault(Trouble.GAP, f"rows {hop.sent} to {go.start} are no longer kept here")
        out.send(to.address, Lane.BULK, Rows(to.handle, go.epoch, hop.sent, count, rows))
        hop.sent += count
    return None


def send_rows(out: Outbox, hop: Hop, first: int, rows: bytes | memoryview, row_bytes: int) -> None:
    """Rows [first, ...) of a step: below n on bulk at once, later ones on live when it is their turn (R9)."""
    go = hop.go
    assert go is not None and go.successor is not None
    n, to = go.length - 1, go.successor
    end = first + len(rows) // row_bytes
    view = memoryview(rows)
    step = max(1, BULK_GROUP_BYTES // row_bytes)
    for at in range(first, min(end, n), step):
        count = min(step, end - at, n - at)
        part = view[(at - first) * row_bytes : (at - first + count) * row_bytes]
        out.send(to.address, Lane.BULK, Rows(to.handle, go.epoch, at, count, part))
        hop.sent = at + count
    for at in range(max(first, n), end):
        part = view[(at - first) * row_bytes : (at - first + 1) * row_bytes]
        hop.unsent.append((at, part))
    flush_live(out, hop)


def flush_live(out: Outbox, hop: Hop) -> None:
    """Send the rows >= n that waited until all bulk rows were acknowledged (R9)."""
    go = hop.go
    assert go is not None and go.successor is not None
    n, to = go.length - 1, go.successor
    if go.send_from < n and hop.acked < n:
        return
    while hop.unsent:
        at, row = hop.unsent.popleft()
        rows = Rows(to.handle, go.epoch, at, 1, row, sample=True)
        out.send(to.address, Lane.LIVE, rows)
        hop.sent = at + 1


def send_picked(out: Outbox, hop: Hop, picked: Picked) -> None:
    """Log the sampled token and send it: to the gateway always, into the ring up to the credit (R7)."""
    go = hop.go
    assert go is not None
    position = len(hop.log)
    finish = Finish.NONE
    if picked.token in hop.turn.sampling.eos:
        finish = Finish.STOP
    elif position + 1 >= hop.turn.end:
        finish = Finish.LENGTH
    hop.log.append(picked.token)
    hop.finished = finish is not Finish.NONE
    token = Token(hop.reply, go.epoch, position, picked.token, picked.logprob, finish)
    if go.ring is None:
        hop.tokens_sent = position + 1
    else:
        hop.held = replace(token, handle=go.ring.handle, store_only=hop.finished)
        release(out, hop)  # first: the head waits for it, the gateway only passes it on
    out.to_gateway(hop.gateway, token)


def release(out: Outbox, hop: Hop) -> None:
    """Send the held token into the ring if the credit reaches it, or if it is the last."""
    token, go = hop.held, hop.go
    if token is None or go is None or go.ring is None:
        return
    if token.position < hop.credit or token.store_only:
        hop.held = None
        hop.tokens_sent = token.position + 1
        out.send(go.ring.address, Lane.LIVE, token)


def send_read(out: Outbox, hop: Hop) -> None:
    """Nothing is to be sampled: say once that the log has been read (max_tokens = 0)."""
    go = hop.go
    assert go is not None
    if not go.sample and not hop.finished and hop.kv >= go.length - 1:
        hop.finished = True
        token = Token(hop.reply, go.epoch, go.length, -1, 0.0, Finish.LENGTH)
        out.to_gateway(hop.gateway, token)
