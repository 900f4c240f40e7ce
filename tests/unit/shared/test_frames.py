"""Items survive packing into frames unchanged; damaged frames raise FrameError and nothing else."""

from __future__ import annotations

import random
import struct

import pytest

from modelswarm.protocol.identity import MAX_NUMBER, Epoch
from modelswarm.protocol.messages import (
    MAX_FORCED_TOKENS,
    Close,
    Finish,
    Heartbeat,
    Input,
    Item,
    ModelFileChunk,
    PromptLogprob,
    PromptLogprobs,
    Rows,
    Token,
    TopLogprob,
    Window,
)
from modelswarm.protocol.opaque import opaque_entries
from modelswarm.protocol.wire.codec import FrameError
from modelswarm.protocol.wire.frames import FRAME_TARGET, MAX_FRAME, MAX_ITEMS, pack, unpack

HANDLE = (1 << 64) - 3
EPOCH = Epoch(7, 1 << 40)
HUGE = MAX_NUMBER + 1


def make_rows(first: int, count: int, row_bytes: int, *, sample: bool = False) -> Rows:
    payload = random.Random(first).randbytes(count * row_bytes)
    return Rows(HANDLE, EPOCH, first, count, payload, sample)


MIXED: list[Item] = [
    Token(HANDLE, EPOCH, 55, 151645, -1.25, Finish.STOP, True),
    Token(1, EPOCH, 56, -1, 0.0, Finish.LENGTH),
    Token(1, EPOCH, 57, 5, -0.5, top=(TopLogprob(5, -0.5), TopLogprob(1 << 20, -2.75))),
    Token(1, EPOCH, 58, 5, -0.5, forced=(6, 7, 8)),
    Token(1, EPOCH, 62, 5, -0.5, Finish.LENGTH, True, (TopLogprob(5, -0.5),), tuple(range(16))),
    PromptLogprobs(1, EPOCH, 1, (PromptLogprob(4, -0.5), PromptLogprob(6, -1.5))),
    PromptLogprobs(1, EPOCH, 9, (PromptLogprob(4, -0.5, (TopLogprob(5, -0.25),)),)),
    make_rows(7, 3, 100, sample=True),
    Window(HANDLE, EPOCH, 5, 6),
    Rows(2, EPOCH, 1 << 40, 1, b"x", False, True),
    Close(3),
]


def round_trip(items: list[Item]) -> list[Item]:
    return [item for frame in pack(items) for item in unpack(frame)]


def test_mixed_items_share_a_frame_in_order() -> None:
    frames = list(pack(MIXED))
    assert len(frames) == 1
    assert unpack(frames[0]) == MIXED


@pytest.mark.parametrize("finish", Finish)
def test_finish_reason_round_trips(finish: Finish) -> None:
    token = Token(1, EPOCH, 2, 3, -0.5, finish)
    assert round_trip([token]) == [token]


def test_empty_item_list_packs_to_no_frame() -> None:
    assert list(pack([])) == []


def test_unpacked_rows_are_aligned_views_of_the_frame() -> None:
    items: list[Item] = [Close(1), make_rows(0, 1, 33), Close(2), make_rows(1, 2, 64)]
    frame = next(iter(pack(items)))
    for item in unpack(frame):
        if isinstance(item, Rows):
            assert isinstance(item.payload, memoryview)
            assert item.payload.obj is frame
            assert frame.index(item.payload) % 8 == 0


def test_long_rows_split_between_rows_and_only_last_part_samples() -> None:
    long = make_rows(10, 1000, 4096, sample=True)
    frames = list(pack([long]))
    parts = [item for frame in frames for item in unpack(frame)]
    assert max(map(len, frames)) <= FRAME_TARGET
    assert all(isinstance(part, Rows) for part in parts)
    runs = [part for part in parts if isinstance(part, Rows)]
    assert b"".join(run.payload for run in runs) == long.payload
    assert [run.sample for run in runs] == [False] * (len(runs) - 1) + [True]
    at = 10
    for run in runs:
        assert run.first == at
        at += run.count
    assert at == 1010


def test_row_larger_than_the_target_gets_its_own_frame() -> None:
    wide = make_rows(0, 2, FRAME_TARGET + 8)
    assert len(list(pack([wide]))) == 2


def test_long_input_is_split_into_inputs() -> None:
    tokens = tuple(range(100_000))
    parts = round_trip([Input(HANDLE, EPOCH, 3, tokens)])
    at = 3
    for part in parts:
        assert isinstance(part, Input)
        assert part.start == at
        at += len(part.tokens)
    assert [t for part in parts if isinstance(part, Input) for t in part.tokens] == list(tokens)


def test_long_input_keeps_the_rows_of_its_opaque_entries() -> None:
    rows = [at.to_bytes(8, "little") for at in range(20_000)]
    item = Input(HANDLE, EPOCH, 3, opaque_entries(rows), b"".join(rows))
    assert round_trip([item]) == [item]


def test_many_small_items_are_spread_over_frames() -> None:
    items: list[Item] = [Close(i + 1) for i in range(3 * MAX_ITEMS)]
    frames = list(pack(items))
    assert max(len(unpack(frame)) for frame in frames) <= MAX_ITEMS
    assert max(map(len, frames)) <= FRAME_TARGET
    assert [item for frame in frames for item in unpack(frame)] == items


@pytest.mark.parametrize(
    "forced", [(5,) * (MAX_FORCED_TOKENS + 1), (5, -1)], ids=["many", "negative"]
)
def test_forced_tokens_out_of_range_are_malformed(forced: tuple[int, ...]) -> None:
    (frame,) = pack([Token(1, EPOCH, 58, 5, -0.5, forced=forced)])
    with pytest.raises(FrameError, match="forced"):
        unpack(frame)


def test_forced_tokens_without_a_sampled_one_are_malformed() -> None:
    (frame,) = pack([Token(1, EPOCH, 58, -1, forced=(5,))])
    with pytest.raises(FrameError, match="forced"):
        unpack(frame)


@pytest.mark.parametrize("kept", [56, 60, 64, 68])
def test_token_without_all_its_forced_ones_is_malformed(kept: int) -> None:
    (frame,) = pack([Token(1, EPOCH, 58, 5, -0.5, forced=(6, 7, 8))])
    short = struct.pack("<BxxxI", 3, kept - 8) + frame[8:kept]
    with pytest.raises(FrameError, match="a token of"):
        unpack(short + bytes(-len(short) % 8))


def test_item_larger_than_a_frame_raises_value_error() -> None:
    with pytest.raises(ValueError, match="does not fit into a frame"):
        list(pack([ModelFileChunk("x", 0, MAX_FRAME, bytes(MAX_FRAME))]))


def test_greatest_numbers_round_trip() -> None:
    greatest = Epoch(MAX_NUMBER, MAX_NUMBER)
    items: list[Item] = [
        Token(HANDLE, greatest, MAX_NUMBER, 1),
        Rows(HANDLE, greatest, MAX_NUMBER, 1, b"x"),
        Window(HANDLE, greatest, MAX_NUMBER, MAX_NUMBER),
    ]
    assert round_trip(items) == items


def test_item_that_cannot_be_encoded_leaves_out_no_other() -> None:
    past = Epoch(1 << 64, 1)
    faulty: list[Item] = [Token(1, past, 1, 1), Window(1, past, 1, 1), Close(-1)]
    good: list[Item] = [Close(2), Close(3), Close(4), Close(5)]
    mixed = [item for pair in zip(good, [*faulty, Close(6)], strict=True) for item in pair]
    left_out: list[Item] = []

    frames = list(pack(mixed, lambda item, error: left_out.append(item)))

    assert [item for frame in frames for item in unpack(frame)] == [*good, Close(6)]
    assert left_out == faulty
    for item in faulty:
        with pytest.raises((ValueError, struct.error)):
            list(pack([item]))


def make_item(kind: int, body: bytes, length: int | None = None) -> bytes:
    head = struct.pack("<BxxxI", kind, len(body) if length is None else length)
    return head + body + bytes(-len(body) % 8)


def make_rows_body(
    count: int, flags: int, payload: bytes, epoch: Epoch = EPOCH, first: int = 0
) -> bytes:
    return struct.pack("<QQQQII", 1, *epoch, first, count, flags) + payload


def make_token_body(
    token: int = 1, finish: int = 0, flags: int = 0, epoch: Epoch = EPOCH, position: int = 0
) -> bytes:
    return struct.pack("<QQQQdiBB2x", 1, *epoch, position, 0.0, token, finish, flags)


MALFORMED = {
    "empty": b"",
    "frame above the maximum": bytes(MAX_FRAME + 8),
    "zeros": bytes(64),
    "truncated header": make_item(3, make_token_body())[:4],
    "unknown kind": make_item(9, b""),
    "length beyond the end": make_item(3, make_token_body(), 1 << 31),
    "maximum length": make_item(3, b"", (1 << 32) - 1),
    "rows without a header": make_item(2, bytes(39)),
    "row count of zero": make_item(2, make_rows_body(0, 0, b"")),
    "rows without payload": make_item(2, make_rows_body(2, 0, b"")),
    "payload of partial rows": make_item(2, make_rows_body(3, 0, bytes(8))),
    "more rows than bytes": make_item(2, make_rows_body(0xFFFFFFFF, 0, bytes(8))),
    "unknown row flags": make_item(2, make_rows_body(1, 4, bytes(8))),
    "short token": make_item(3, make_token_body()[:-8]),
    "long token": make_item(3, make_token_body() + bytes(8)),
    "unknown finish reason": make_item(3, make_token_body(finish=3)),
    "unknown token flags": make_item(3, make_token_body(flags=2)),
    "token below -1": make_item(3, make_token_body(token=-2)),
    "token epoch above the maximum": make_item(3, make_token_body(epoch=Epoch(HUGE, 1))),
    "token gateway above the maximum": make_item(3, make_token_body(epoch=Epoch(1, HUGE))),
    "token position above the maximum": make_item(3, make_token_body(position=HUGE)),
    "rows epoch above the maximum": make_item(2, make_rows_body(1, 0, b"x", Epoch(HUGE, 1))),
    "rows gateway above the maximum": make_item(2, make_rows_body(1, 0, b"x", Epoch(1, HUGE))),
    "row position above the maximum": make_item(2, make_rows_body(1, 0, b"x", first=HUGE)),
    "empty control message": make_item(1, b""),
    "too many items": b"".join(pack([Close(1)])) * (MAX_ITEMS + 1),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frame_raises_frame_error(frame: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(frame)


def can_unpack(frame: bytes) -> bool:
    try:
        unpack(frame)
    except FrameError:
        return False
    return True


def test_random_bytes_raise_frame_error() -> None:
    random_bytes = random.Random(1)
    for _ in range(5000):
        assert not can_unpack(random_bytes.randbytes(random_bytes.randrange(1, 200)))


def test_truncated_frame_is_refused_except_between_items() -> None:
    frame = next(iter(pack(MIXED)))
    unpacked = [size for size in range(len(frame)) if can_unpack(frame[:size])]
    # A cut between two items is a valid shorter frame. gRPC keeps messages whole, so only a bug can make one.
    assert len(unpacked) == len(MIXED) - 1


def test_flipped_bits_raise_only_frame_error() -> None:
    rng = random.Random(2)
    whole = next(iter(pack([*MIXED, Heartbeat(1, 2.0), Input(5, EPOCH, 0, (1, 2, 3))])))
    refused = 0
    for _ in range(20000):
        frame = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        refused += not can_unpack(bytes(frame))
    assert refused > 1000
