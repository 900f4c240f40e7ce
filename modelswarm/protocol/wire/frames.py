"""Packs several items into one frame, the unit of a write on a lane; and unpacks frames.

A frame is a run of items, little endian. Each item is
`kind u8 | 3 zero bytes | body length u32 | body | zeros to a multiple of 8`.
Control bodies are protobuf (`codec.py`), rows a packed header and
then raw bytes, tokens a packed struct. Bodies start at multiples of 8, so that rows can be viewed as
numbers in place: `unpack` copies no rows. A malformed frame raises FrameError and nothing else.
Called by `lane.py`, `handshake.py` and tests. Knows no connections.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator

from typing_extensions import Buffer

from modelswarm.protocol.identity import MAX_NUMBER, Epoch
from modelswarm.protocol.messages import (
    MAX_FORCED_TOKENS,
    Finish,
    Input,
    Item,
    PromptLogprob,
    PromptLogprobs,
    Rows,
    Token,
    TopLogprob,
)
from modelswarm.protocol.wire.codec import FrameError, decode, encode

MAX_FRAME = 4 << 20
"""Maximum bytes of a frame; a longer one closes its link."""

MAX_ITEMS = 16384
"""Maximum items of a frame."""

FRAME_TARGET = 256 << 10
"""Bytes at which a frame is ended: 20 ms at 100 Mbit/s, so that no item waits long behind a frame."""

_CONTROL, _ROWS, _TOKEN, _PROMPT = 1, 2, 3, 4
_ITEM = struct.Struct("<BxxxI")  # kind, body length
_ROWS_HEAD = struct.Struct("<QQQQII")  # handle, epoch (counter, gateway), first, count, flags
# handle, epoch (counter, gateway), position, logprob, token, finish, flags, number of forced tokens
_TOKEN_BODY = struct.Struct("<QQQQdiBBH")
_PROMPT_HEAD = struct.Struct("<QQQQII")  # handle, epoch (counter, gateway), start, count, top
_TOP_LOGPROB = struct.Struct("<di4x")  # log probability, token
_ROWS_TARGET = FRAME_TARGET - _ITEM.size - _ROWS_HEAD.size
_SAMPLE, _STORE_ONLY = 1, 2
_FINISH_REASONS = (Finish.NONE, Finish.STOP, Finish.LENGTH)
_FINISH_NUMBERS = {finish: number for number, finish in enumerate(_FINISH_REASONS)}
_ENCODING_ERRORS = (ValueError, TypeError, struct.error)  # of protobuf and struct
_INPUT_TOKENS = 16384  # entries of an Input that always fit into FRAME_TARGET


def pack(
    items: Iterable[Item], on_unencodable: Callable[[Item, Exception], None] | None = None
) -> Iterator[bytes]:
    """Yield frames with the items in order. Rows, and inputs without rows, are split if they are too long for one.

    An item that cannot be encoded is a bug of this process. It goes to `on_unencodable`, or its error is raised.
    """
    parts: list[bytes | memoryview] = []
    size = count = 0
    for item in _split_long_items(items):
        try:
            body = _encode_item(item)
            length = sum(map(len, body))
            padding = -length % 8
            if length + padding > MAX_FRAME:
                raise ValueError(
                    f"a {type(item).__name__} of {length} bytes does not fit into a frame"
                )
        except _ENCODING_ERRORS as error:
            if on_unencodable is None:
                raise
            on_unencodable(item, error)
            continue
        if parts and (size + length + padding > FRAME_TARGET or count == MAX_ITEMS):
            yield b"".join(parts)
            parts, size, count = [], 0, 0
        parts += body
        if padding:
            parts.append(bytes(padding))
        size += length + padding
        count += 1
    if parts:
        yield b"".join(parts)


def unpack(frame: Buffer) -> list[Item]:
    """Return the items of a frame. Payloads of rows are views, which keep the frame in memory."""
    view = memoryview(frame)
    size = view.nbytes
    if not 0 < size <= MAX_FRAME:
        raise FrameError(f"a frame of {size} bytes; 1 to {MAX_FRAME} are allowed")
    items: list[Item] = []
    at = 0
    while at < size:
        if size - at < _ITEM.size:
            raise FrameError("a frame ends inside an item header")
        kind, length = _ITEM.unpack_from(view, at)
        start = at + _ITEM.size
        end = start + length
        at = end + (-length % 8)
        if at > size:
            raise FrameError("a frame ends inside an item")
        if len(items) == MAX_ITEMS:
            raise FrameError(f"more than {MAX_ITEMS} items in a frame")
        items.append(_decode_item(kind, view[start:end]))
    return items


def _decode_item(kind: int, body: memoryview) -> Item:
    if kind == _ROWS:
        return _decode_rows(body)
    if kind == _TOKEN:
        return _decode_token(body)
    if kind == _CONTROL:
        return decode(body)
    if kind == _PROMPT:
        return _decode_prompt_logprobs(body)
    raise FrameError(f"an item of kind {kind}")


def _encode_item(item: Item) -> tuple[bytes | memoryview, ...]:
    """Item header and body, unpadded; rows are not copied here."""
    if type(item) is Rows:
        flags = _SAMPLE * item.sample | _STORE_ONLY * item.kv_copy
        length = _ROWS_HEAD.size + len(item.payload)
        fields = (item.handle, *item.epoch, item.first, item.count, flags)
        return _ITEM.pack(_ROWS, length) + _ROWS_HEAD.pack(*fields), item.payload
    if type(item) is Token:
        finish = _FINISH_NUMBERS[item.finish]
        body = _TOKEN_BODY.pack(
            item.handle,
            *item.epoch,
            item.position,
            item.logprob,
            item.token,
            finish,
            item.store_only,
            len(item.forced),
        )
        body += struct.pack(_forced_format(len(item.forced)), *item.forced)
        body += b"".join(_TOP_LOGPROB.pack(each.logprob, each.token) for each in item.top)
        return (_ITEM.pack(_TOKEN, len(body)) + body,)
    if type(item) is PromptLogprobs:
        body = _encode_prompt_logprobs(item)
        return (_ITEM.pack(_PROMPT, len(body)) + body,)
    assert not isinstance(item, Rows | Token | PromptLogprobs)
    body = encode(item)
    return (_ITEM.pack(_CONTROL, len(body)) + body,)


def _decode_rows(body: memoryview) -> Rows:
    if len(body) < _ROWS_HEAD.size:
        raise FrameError("rows without a whole header")
    handle, counter, gateway, first, count, flags = _ROWS_HEAD.unpack_from(body)
    if max(counter, gateway, first) > MAX_NUMBER:
        raise FrameError(f"rows with an epoch or position above {MAX_NUMBER}")
    payload = body[_ROWS_HEAD.size :]
    if count == 0 or len(payload) == 0 or len(payload) % count:
        raise FrameError(f"{len(payload)} bytes are not {count} rows")
    if flags > _SAMPLE | _STORE_ONLY:
        raise FrameError(f"rows with unknown flags {flags:#x}")
    return Rows(
        handle,
        Epoch(counter, gateway),
        first,
        count,
        payload,
        bool(flags & _SAMPLE),
        bool(flags & _STORE_ONLY),
    )


def _decode_token(body: memoryview) -> Token:
    head = _TOKEN_BODY.size
    if len(body) < head:
        raise FrameError(f"a token of {len(body)} bytes")
    handle, counter, gateway, position, logprob, token, finish, flags, count = (
        _TOKEN_BODY.unpack_from(body)
    )
    layout = _forced_format(count)
    size = head + struct.calcsize(layout)
    if len(body) < size or (len(body) - size) % _TOP_LOGPROB.size:
        raise FrameError(f"a token of {len(body)} bytes")
    forced = struct.unpack_from(layout, body, head)
    if max(counter, gateway, position) > MAX_NUMBER:
        raise FrameError(f"a token with an epoch or position above {MAX_NUMBER}")
    if finish >= len(_FINISH_REASONS) or flags > 1 or token < -1:
        raise FrameError("a token with unknown finish, flags or number")
    if forced and (count > MAX_FORCED_TOKENS or min(token, *forced) < 0):
        raise FrameError(f"a token with {count} forced ones, {MAX_FORCED_TOKENS} are allowed")
    epoch, reason = Epoch(counter, gateway), _FINISH_REASONS[finish]
    top = () if len(body) == size else _decode_top(body[size:])
    return Token(handle, epoch, position, token, logprob, reason, flags == 1, top, forced)


def _forced_format(count: int) -> str:
    """Return the struct format of so many forced tokens, padded to 8 bytes."""
    return f"<{count}i{count % 2 * 4}x"


def _encode_prompt_logprobs(item: PromptLogprobs) -> bytes:
    """Every entry has as many top alternatives as the first one."""
    entries = item.entries
    top = len(entries[0].top)
    if any(len(entry.top) != top for entry in entries):
        raise ValueError("entries of a prompt with different numbers of top alternatives")
    head = _PROMPT_HEAD.pack(item.handle, *item.epoch, item.start, len(entries), top)
    parts = [head]
    for entry in entries:
        parts.append(_TOP_LOGPROB.pack(entry.logprob, entry.token))
        parts += [_TOP_LOGPROB.pack(each.logprob, each.token) for each in entry.top]
    return b"".join(parts)


def _decode_prompt_logprobs(body: memoryview) -> PromptLogprobs:
    if len(body) < _PROMPT_HEAD.size:
        raise FrameError("log probabilities of a prompt without a whole header")
    handle, counter, gateway, start, count, top = _PROMPT_HEAD.unpack_from(body)
    if max(counter, gateway, start) > MAX_NUMBER:
        raise FrameError(f"log probabilities with an epoch or position above {MAX_NUMBER}")
    values = body[_PROMPT_HEAD.size :]
    if count == 0 or len(values) != count * (1 + top) * _TOP_LOGPROB.size:
        raise FrameError(f"{len(values)} bytes are not {count} log probabilities with {top} others")
    each = _decode_top(values)
    entries = tuple(
        PromptLogprob(each[at].token, each[at].logprob, each[at + 1 : at + 1 + top])
        for at in range(0, len(each), 1 + top)
    )
    return PromptLogprobs(handle, Epoch(counter, gateway), start, entries)


def _decode_top(body: memoryview) -> tuple[TopLogprob, ...]:
    top = tuple(TopLogprob(token, logprob) for logprob, token in _TOP_LOGPROB.iter_unpack(body))
    if any(each.token < 0 for each in top):
        raise FrameError("a top log probability of a negative token")
    return top


def _split_long_items(items: Iterable[Item]) -> Iterator[Item]:
    for item in items:
        if type(item) is Rows and len(item.payload) > _ROWS_TARGET:
            yield from _split_rows(item)
        elif type(item) is Input and len(item.tokens) > _INPUT_TOKENS and not item.rows:
            for at in range(0, len(item.tokens), _INPUT_TOKENS):
                tokens = item.tokens[at : at + _INPUT_TOKENS]
                yield Input(item.handle, item.epoch, item.start + at, tokens)
        else:
            yield item


def _split_rows(rows: Rows) -> Iterator[Rows]:
    row_bytes = len(rows.payload) // rows.count
    step = max(1, _ROWS_TARGET // row_bytes)
    view = memoryview(rows.payload)
    for at in range(0, rows.count, step):
        count = min(step, rows.count - at)
        yield Rows(
            rows.handle,
            rows.epoch,
            rows.first + at,
            count,
            view[at * row_bytes : (at + count) * row_bytes],
            rows.sample and at + count == rows.count,
            rows.kv_copy,
        )
