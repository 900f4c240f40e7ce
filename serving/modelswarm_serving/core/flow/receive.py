"""Receives rows, tokens and log entries for a hop (R1: rows never truncate, R10: nothing overtakes StartEpoch).

Returns the fault found, or None. Called by `server.py`, which has checked handle, epoch, phase and sender, and
reports the fault. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import FaultKind, Input, Rows, Token, Window
from modelswarm.protocol.opaque import chain_bytes, split_rows, without_opaque
from modelswarm_serving.core.hops.hop import EarlyMessages, Fault, Hop
from modelswarm_serving.core.settings import TRANSFER_WINDOW_BYTES
from modelswarm_serving.model.base import ModelShape

MAX_EARLY_WINDOWS = 16
MAX_EARLY_INPUTS = 64
MAX_EARLY_KV = 16


def receive_rows(hop: Hop, rows: Rows, row_bytes: int) -> Fault | None:
    if rows.count <= 0 or rows.first < 0 or len(rows.payload) != rows.count * row_bytes:
        return Fault(FaultKind.FAILED, f"{rows.count} rows in {len(rows.payload)} bytes")
    end = rows.first + rows.count
    if end <= hop.received:
        return None
    if rows.first > hop.received:
        return Fault(FaultKind.GAP, f"row {rows.first} came, {hop.received} was expected")
    if end > hop.granted:
        return Fault(FaultKind.FAILED, f"rows up to {end} came, {hop.granted} were granted")
    have = hop.received - rows.first
    hop.row_buffer.append_rows(rows.payload[have * row_bytes :] if have else rows.payload)
    hop.received = end
    return None


def receive_input(hop: Hop, entries: Input, shape: ModelShape) -> Fault | None:
    """Append log entries from the gateway, with the rows of opaque ones; the head runs them, the tail stores them.

    A hop between them keeps only the rows, of its own blocks.
    """
    rows = split_rows(entries.start, entries.tokens, entries.rows)
    if rows is None:
        return Fault(FaultKind.FAILED, "opaque entries without rows of one size")
    for at, row in rows.items():
        if len(row) != (wanted := _opaque_bytes(hop, at, shape)):
            detail = f"the row of entry {at} has {len(row)} bytes, {wanted} are expected"
            return Fault(FaultKind.FAILED, detail)
    if not hop.has_log:
        hop.opaque |= rows
        return None
    have = len(hop.log)
    fault = _append_log(hop, entries.start, entries.tokens, shape.vocab_size, may_be_opaque=True)
    if fault is None:
        hop.opaque.update({at: row for at, row in rows.items() if at >= have})
    return fault


def _opaque_bytes(hop: Hop, position: int, shape: ModelShape) -> int:
    """Return the bytes of the row of an opaque entry; 0 if the hop is to have none."""
    is_chain = position < hop.turn.prompt_rows
    if hop.has_log:
        return chain_bytes(shape.row_bytes, shape.n_blocks) if is_chain else shape.row_bytes
    return shape.row_bytes * (hop.last - hop.first) if is_chain else 0


def receive_token(hop: Hop, token: Token, vocabulary: int) -> Fault | None:
    """Append the head's next token and those forced after it, which came through the ring."""
    stored = len(hop.log)
    if hop.finished:
        return None
    fault = _append_log(hop, token.position, token.group, vocabulary)
    if token.store_only and len(hop.log) > stored:
        hop.finished = True
    return fault


def _append_log(
    hop: Hop, start: int, tokens: Sequence[int], vocabulary: int, *, may_be_opaque: bool = False
) -> Fault | None:
    have = len(hop.log)
    end = start + len(tokens)
    if start < 0 or end > hop.turn.end:
        return Fault(FaultKind.FAILED, f"entries {start} to {end} of a log of {hop.turn.end}")
    if start > have:
        return Fault(FaultKind.GAP, f"entry {start} came, {have} was expected")
    fresh = tokens[have - start :]
    if not fresh:
        return None
    known = without_opaque(fresh) if may_be_opaque else fresh
    if known and not 0 <= min(known) <= max(known) < vocabulary:
        return Fault(FaultKind.FAILED, f"a token outside the vocabulary of {vocabulary}")
    if hop.in_step and hop.is_tail:  # the model may have borrowed the list
        hop.log = [*hop.log, *fresh]
    else:
        hop.log.extend(fresh)
    hop.on_log_extended()
    return None


def buffer_early_rows(
    early: EarlyMessages, peer: PeerId, rows: Rows, limit: int, row_bytes: int
) -> None:
    """Buffer rows that came before StartEpoch; dropped rows show as a gap later.

    The limit counts rows of equal length. Those of a KV transfer are longer, but only one window of them comes before
    StartEpoch.
    """
    if len(rows.payload) != rows.count * row_bytes:
        if (
            rows.kv_copy
            and len(rows.payload) <= TRANSFER_WINDOW_BYTES
            and len(early.rows) < MAX_EARLY_KV
        ):
            early.rows.append((peer, rows))
        return
    if 0 < rows.count <= limit - early.row_count:
        early.rows.append((peer, rows))
        early.row_count += rows.count


def buffer_early_window(early: EarlyMessages, peer: PeerId, window: Window) -> None:
    old = early.windows.get(peer)
    if old is None and len(early.windows) >= MAX_EARLY_WINDOWS:
        return
    if old is None or (window.limit, window.received) > (old.limit, old.received):
        early.windows[peer] = window


def buffer_early_input(early: EarlyMessages, entries: Input) -> None:
    if len(early.inputs) < MAX_EARLY_INPUTS:
        early.inputs.append(entries)
