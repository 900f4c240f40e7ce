"""What a running hop does with rows, tokens and log entries that arrive (R1, R10). Each returns the fault it found.

Called by `server.py`, which has checked handle, epoch, phase and sender, and reports the fault. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Input, Rows, Token, Trouble, Window
from modelswarm_serving.core.hops.hop import Early, Fault, Hop
from modelswarm_serving.core.settings import COPY_WINDOW_BYTES

EARLY_WINDOWS = 16
EARLY_INPUTS = 64
EARLY_COPIED = 16


def take_rows(hop: Hop, rows: Rows, row_bytes: int) -> Fault | None:
    if rows.count <= 0 or rows.first < 0 or len(rows.payload) != rows.count * row_bytes:
        return Fault(Trouble.FAILED, f"{rows.count} rows in {len(rows.payload)} bytes")
    end = rows.first + rows.count
    if end <= hop.received:
        return None
    if rows.first > hop.received:
        return Fault(Trouble.GAP, f"row {rows.first} came, {hop.received} was expected")
    if end > hop.granted:
        return Fault(Trouble.FAILED, f"rows up to {end} came, {hop.granted} were granted")
    have = hop.received - rows.first
    hop.inbox.put(rows.payload[have * row_bytes :] if have else rows.payload)
    hop.received = end
    return None


def take_input(hop: Hop, entries: Input, vocabulary: int) -> Fault | None:
    """Log entries from the gateway; the head runs them, the tail stores them."""
    return _store(hop, entries.start, entries.tokens, vocabulary)


def take_token(hop: Hop, token: Token, vocabulary: int) -> Fault | None:
    """The head's next token, from the ring."""
    stored = len(hop.log)
    if hop.finished:
        return None
    fault = _store(hop, token.position, (token.token,), vocabulary)
    if token.store_only and len(hop.log) > stored:
        hop.finished = True
    return fault


def _store(hop: Hop, start: int, tokens: Sequence[int], vocabulary: int) -> Fault | None:
    have = len(hop.log)
    end = start + len(tokens)
    if start < 0 or end > hop.turn.end:
        return Fault(Trouble.FAILED, f"entries {start} to {end} of a log of {hop.turn.end}")
    if start > have:
        return Fault(Trouble.GAP, f"entry {start} came, {have} was expected")
    fresh = tokens[have - start :]
    if not fresh:
        return None
    if min(fresh) < 0 or max(fresh) >= vocabulary:
        return Fault(Trouble.FAILED, f"a token outside the vocabulary of {vocabulary}")
    if hop.busy and hop.is_tail:  # the model may have borrowed the list
        hop.log = [*hop.log, *fresh]
    else:
        hop.log.extend(fresh)
    return None


def keep_rows(early: Early, peer: PeerId, rows: Rows, limit: int, row_bytes: int) -> None:
    """Before Go; what does not fit is a gap later. Counted in rows, so each must be as long as a row is; those of a
    copy are longer, but no more than one window of it comes before Go."""
    if len(rows.payload) != rows.count * row_bytes:
        if (
            rows.store_only
            and len(rows.payload) <= COPY_WINDOW_BYTES
            and len(early.rows) < EARLY_COPIED
        ):
            early.rows.append((peer, rows))
        return
    if 0 < rows.count <= limit - early.row_count:
        early.rows.append((peer, rows))
        early.row_count += rows.count


def keep_window(early: Early, peer: PeerId, window: Window) -> None:
    old = early.windows.get(peer)
    if old is None and len(early.windows) >= EARLY_WINDOWS:
        return
    if old is None or (window.limit, window.received) > (old.limit, old.received):
        early.windows[peer] = window


def keep_input(early: Early, entries: Input) -> None:
    if len(early.inputs) < EARLY_INPUTS:
        early.inputs.append(entries)
