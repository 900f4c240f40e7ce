"""Sends the output of a running hop: rows to its successor, tokens to gateway and head.

Called by `server.py` and `step.py` after a step and when a window comes. Plans nothing: computed rows were planned
within the successor's window, and retained rows are sent only as far as the window reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelswarm.protocol.messages import (
    FaultKind,
    Finish,
    Lane,
    PromptLogprob,
    PromptLogprobs,
    Rows,
    StartEpoch,
    Token,
)
from modelswarm_serving.core.hops.hop import Fault, Hop
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.replay_log import ReplayLog
from modelswarm_serving.model.base import SampledToken

SCORES_PER_ITEM = 256
"""Log probabilities of a prompt in one item: at most 86 KiB with 20 alternatives each."""
BULK_GROUP_BYTES = 256 * 1024
"""A control message never waits for longer than this on a shared wire; frames stay under 4 MiB."""


def retained_fault(log: ReplayLog, hop: Hop, message: StartEpoch) -> Fault | None:
    """Return a fault if the replay log lacks rows that this StartEpoch needs; else None."""
    if hop.is_tail or message.send_from >= message.start:
        return None
    start, end = log.retained_range(hop.handle)
    if start <= message.send_from and message.start <= end:
        return None
    return Fault(
        FaultKind.GAP, f"rows {message.send_from} to {message.start} are not retained here"
    )


def send_retained(out: Outbox, hop: Hop, log: ReplayLog, row_bytes: int) -> Fault | None:
    """Send retained rows [sent, start) on the bulk lane, as far as the successor's window reaches (R6, replay).

    They leave before the first computed row, because no row is computed beyond that window.
    """
    started = hop.started
    if started is None or started.successor is None or hop.sent >= started.start:
        return None
    to, step = started.successor, max(1, BULK_GROUP_BYTES // row_bytes)
    end = min(started.start, hop.window)
    while hop.sent < end:
        count = min(step, end - hop.sent)
        rows = log.read_rows(hop.handle, hop.sent, hop.sent + count)
        if rows is None:
            return Fault(
                FaultKind.GAP, f"rows {hop.sent} to {started.start} are no longer retained here"
            )
        out.send(to.address, Lane.BULK, Rows(to.handle, started.epoch, hop.sent, count, rows))
        hop.sent += count
    return None


def send_rows(out: Outbox, hop: Hop, first: int, rows: bytes | memoryview, row_bytes: int) -> None:
    """Send rows [first, ...) of a step: those below n on bulk at once, later ones on live in turn.

    See R9 (one lane at a time).
    """
    started = hop.started
    assert started is not None and started.successor is not None
    n, to = started.length - 1, started.successor
    end = first + len(rows) // row_bytes
    view = memoryview(rows)
    step = max(1, BULK_GROUP_BYTES // row_bytes)
    for at in range(first, min(end, n), step):
        count = min(step, end - at, n - at)
        part = view[(at - first) * row_bytes : (at - first + count) * row_bytes]
        out.send(to.address, Lane.BULK, Rows(to.handle, started.epoch, at, count, part))
        hop.sent = at + count
    at = max(first, n)
    if at < end:
        hop.unsent.append((at, end - at, view[(at - first) * row_bytes :]))
    flush_live(out, hop)


def flush_live(out: Outbox, hop: Hop) -> None:
    """Send the rows >= n that waited until all bulk rows were acknowledged (R9, one lane at a time)."""
    started = hop.started
    assert started is not None and started.successor is not None
    n, to = started.length - 1, started.successor
    if started.send_from < n and hop.acked < n:
        return
    while hop.unsent:
        at, count, payload = hop.unsent.popleft()
        rows = Rows(to.handle, started.epoch, at, count, payload, sample=True)
        out.send(to.address, Lane.LIVE, rows)
        hop.sent = at + count


def send_prompt_logprobs(
    out: Outbox, hop: Hop, start: int, scores: Sequence[PromptLogprob]
) -> None:
    """Send the scores on the lane of the Token that follows, so that it does not overtake them."""
    started = hop.started
    assert started is not None
    for at in range(0, len(scores), SCORES_PER_ITEM):
        part = tuple(scores[at : at + SCORES_PER_ITEM])
        item = PromptLogprobs(hop.gateway_handle, started.epoch, start + at, part)
        out.send_to_gateway(hop.gateway, item, _lane_of_tokens(hop))


def _lane_of_tokens(hop: Hop) -> Lane:
    """Return the lane of a tail's tokens: that of the rows that the gateway asked for before them, if any."""
    return Lane.LIVE if hop.returned_rows is None else Lane.BULK


def return_rows(
    out: Outbox, hop: Hop, first: int, rows: bytes | memoryview, row_bytes: int
) -> None:
    """Send logits and hidden states of rows [first, ...) to the gateway, on bulk."""
    started = hop.started
    assert started is not None
    count, view = len(rows) // row_bytes, memoryview(rows)
    step = max(1, BULK_GROUP_BYTES // row_bytes)
    for at in range(0, count, step):
        part = view[at * row_bytes : (at + step) * row_bytes]
        item = Rows(hop.gateway_handle, started.epoch, first + at, len(part) // row_bytes, part)
        out.send_to_gateway(hop.gateway, item, Lane.BULK)


def send_token(out: Outbox, hop: Hop, sampled: SampledToken) -> None:
    """Append the sampled token and those forced after it to the log, and send them as one group.

    To the gateway always, to the ring up to the credit (R7, credit). It must not overtake the rows that the gateway
    asked for of earlier entries, so it goes on their lane.
    """
    started = hop.started
    assert started is not None
    position = len(hop.log)
    hop.log += (sampled.token, *sampled.forced)
    finish = Finish.NONE
    if hop.log[-1] in hop.turn.sampling.eos:
        finish = Finish.STOP
    elif len(hop.log) >= hop.turn.end:
        finish = Finish.LENGTH
    hop.finished = finish is not Finish.NONE
    token = Token(
        hop.gateway_handle,
        started.epoch,
        position,
        sampled.token,
        sampled.logprob,
        finish,
        top=sampled.top,
        forced=sampled.forced,
    )
    if started.ring is None:
        hop.tokens_sent = token.group_end
    else:
        hop.withheld_token = replace(
            token, handle=started.ring.handle, store_only=hop.finished, top=()
        )
        release_token(out, hop)  # before the gateway's copy: the head waits for it
    out.send_to_gateway(hop.gateway, token, _lane_of_tokens(hop))


def release_token(out: Outbox, hop: Hop) -> None:
    """Send the withheld group into the ring if the credit covers it, or if it finishes the turn.

    Never a part of it: a session without credit has no row in flight then.
    """
    token, started = hop.withheld_token, hop.started
    if token is None or started is None or started.ring is None:
        return
    if token.group_end <= hop.credit or token.store_only:
        hop.withheld_token = None
        hop.tokens_sent = token.group_end
        out.send(started.ring.address, Lane.LIVE, token)


def send_log_read(out: Outbox, hop: Hop) -> None:
    """Report once that the log has been read, for a turn without tokens (max_tokens = 0).

    A turn that only returns rows runs row n, too. The report must not overtake them.
    """
    started = hop.started
    assert started is not None
    if started.sample and not hop.only_rows:
        return
    end = started.length if started.sample else started.length - 1
    if not hop.finished and hop.kv >= end:
        hop.finished = True
        token = Token(hop.gateway_handle, started.epoch, started.length, -1, 0.0, Finish.LENGTH)
        out.send_to_gateway(hop.gateway, token, _lane_of_tokens(hop))
