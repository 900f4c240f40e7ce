"""Messages before StartEpoch (R10, early messages): a bounded number is kept, and the newest window of each sender."""

from __future__ import annotations

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.messages import Input, Rows, Window
from modelswarm_serving.core.flow.receive import (
    MAX_EARLY_INPUTS,
    MAX_EARLY_KV,
    MAX_EARLY_WINDOWS,
    buffer_early_input,
    buffer_early_rows,
    buffer_early_window,
)
from modelswarm_serving.core.hops.hop import EarlyMessages
from modelswarm_serving.core.settings import TRANSFER_WINDOW_BYTES

EPOCH = Epoch(1, 1)
ROW_BYTES = 2


def window(received: int, limit: int) -> Window:
    return Window(1, EPOCH, received, limit)


def rows(first: int, count: int, *, payload: bytes | None = None, kv_copy: bool = False) -> Rows:
    return Rows(1, EPOCH, first, count, payload or bytes(ROW_BYTES * count), False, kv_copy=kv_copy)


def test_newest_window_of_each_sender_is_kept() -> None:
    early = EarlyMessages()
    for received, limit, kept in ((1, 4, (1, 4)), (0, 4, (1, 4)), (2, 4, (2, 4)), (9, 3, (2, 4))):
        buffer_early_window(early, "a", window(received, limit))
        assert (early.windows["a"].received, early.windows["a"].limit) == kept
    buffer_early_window(early, "a", window(0, 5))
    assert early.windows == {"a": window(0, 5)}


def test_windows_of_more_senders_are_dropped_and_known_ones_rise() -> None:
    early = EarlyMessages()
    for number in range(MAX_EARLY_WINDOWS + 1):
        buffer_early_window(early, f"s{number}", window(0, 1))
    assert set(early.windows) == {f"s{number}" for number in range(MAX_EARLY_WINDOWS)}
    buffer_early_window(early, "s0", window(0, 2))
    assert early.windows["s0"] == window(0, 2)


def test_rows_are_kept_up_to_the_limit() -> None:
    early = EarlyMessages()
    for first, count in ((0, 3), (3, 3), (3, 2), (5, 0), (5, 1)):
        buffer_early_rows(early, "a", rows(first, count), 5, ROW_BYTES)
    assert [(each.first, each.count) for _, each in early.rows] == [(0, 3), (3, 2)]
    assert early.row_count == 5


def test_rows_of_another_length_are_kept_if_of_a_transfer() -> None:
    early = EarlyMessages()
    buffer_early_rows(early, "a", rows(0, 2, payload=bytes(5)), 5, ROW_BYTES)
    assert early.rows == []
    long = rows(0, 2, payload=bytes(TRANSFER_WINDOW_BYTES + 1), kv_copy=True)
    buffer_early_rows(early, "a", long, 5, ROW_BYTES)
    assert early.rows == []
    kept = rows(0, 2, payload=bytes(TRANSFER_WINDOW_BYTES), kv_copy=True)
    for _ in range(MAX_EARLY_KV + 1):
        buffer_early_rows(early, "a", kept, 5, ROW_BYTES)
    assert early.rows == [("a", kept)] * MAX_EARLY_KV and early.row_count == 0


def test_inputs_are_kept_up_to_the_limit() -> None:
    early, entries = EarlyMessages(), Input(1, EPOCH, 0, (1,))
    for _ in range(MAX_EARLY_INPUTS + 1):
        buffer_early_input(early, entries)
    assert early.inputs == [entries] * MAX_EARLY_INPUTS
