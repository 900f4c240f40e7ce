"""Every control message survives encoding as protobuf unchanged, and all other bytes raise FrameError."""

from __future__ import annotations

import enum
import math
import re
import typing

import pytest

from modelswarm.protocol.identity import MAX_NUMBER, NO_HANDLE, Address, Epoch
from modelswarm.protocol.messages import (
    Close,
    CopyKv,
    Counters,
    Create,
    DrainState,
    FaultKind,
    FaultReport,
    Fence,
    FenceAck,
    FindSession,
    Grammar,
    Heartbeat,
    Hello,
    HopInfo,
    Input,
    Lane,
    LogChunk,
    LogRequest,
    Message,
    ModelFileChunk,
    ModelFileRequest,
    Neighbour,
    OwnedSession,
    OwnedSessions,
    Refusal,
    RetainedRows,
    ReturnedRows,
    Role,
    Sampling,
    SessionInfo,
    StartEpoch,
    Turn,
    Window,
)
from modelswarm.protocol.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_FORCED_TOKENS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
)
from modelswarm.protocol.wire import swarm_pb2
from modelswarm.protocol.wire.codec import MAX_TEXT, FrameError, decode, encode

HANDLE = (1 << 64) - 3
EPOCH = Epoch(7, 1 << 40)
HUGE = MAX_NUMBER + 1
NEIGHBOUR = Neighbour(Address("s1/2/aä", "127.0.0.1:1"), 9)
SAMPLING = Sampling(
    0.7, 40, 0.9, 0.05, 1.1, (1 << 64) - 1, 2, (0, 151645), 5, 0.9, 0.5, -1.5, 3,
    ((5, -100.0), (0, 2.5)), ((7,), (8, 9)), 4, (5, 0), 20, Grammar('{\n"grammars": []}', "llguidance 1.9.1", 16),
)  # fmt: skip
HELLO = Hello(
    (1, 0), "s0/1/ab", Role.SERVER, "l1", Lane.LIVE, "h:1", "m", "r", 0, 4, 8, "bf16", 8,
    numerics="cuda-9.0-132/torch-2.15.0/bfloat16/triton",
)  # fmt: skip
HASHES = (b"", bytes(range(32)))

MESSAGES: list[Message] = [
    HELLO,
    LogChunk("s", EPOCH, 0, 1, (5,), Turn(9, 10, Sampling(returned=ReturnedRows(4, True)))),
    Hello((0, 3), "g", Role.GATEWAY, "", Lane.BULK, max_length=7, total_pages=8, page_size=9),
    Hello((1, 0), "g", Role.GATEWAY, "", Lane.LIVE, replaces=("g/1/ab", "g/2/cd")),
    Fence(NO_HANDLE, 4, EPOCH, 0, 0, Create("s", 0, 4, True, HASHES), Turn(99, 100, SAMPLING), 3),
    Fence(HANDLE, 4, EPOCH, 0, 0, None, Turn(9, 10, prompt_rows=3)),
    Fence(HANDLE, 4, Epoch(0, 0), 10, 11),
    Fence(HANDLE, 4, EPOCH, 10, 11, None, Turn(1, 2), last_started=Epoch(0, 4)),
    FenceAck(
        4, HANDLE, EPOCH, 5, 6, Counters(EPOCH, 1, 2, 3, 4, 5, 6, 7), (RetainedRows(4, 0, 9),), 77
    ),
    FenceAck(4, NO_HANDLE, EPOCH, refusal=Refusal.NO_PAGES, free_pages=3),
    FenceAck(4, NO_HANDLE, EPOCH, unknown=True),
    FenceAck(
        4,
        NO_HANDLE,
        EPOCH,
        refusal=Refusal.STALE_EPOCH,
        owner_epoch=EPOCH,
        owner_last_started=Epoch(2, 1),
    ),
    StartEpoch(HANDLE, EPOCH, 10, 3, 4, None, NEIGHBOUR, None, 0, 2, False),
    StartEpoch(HANDLE, EPOCH, 10, 3, 4, NEIGHBOUR, None, NEIGHBOUR, 12, standby=True),
    Input(HANDLE, EPOCH, 5, tuple(range(300))),
    Input(HANDLE, EPOCH, 0, ()),
    Window(HANDLE, EPOCH, 5, 6, 7, HASHES),
    FaultReport(4, EPOCH, FaultKind.LINK_DOWN, "s1/2/a", 3, "why"),
    OwnedSessions((OwnedSession("s", HANDLE, EPOCH), OwnedSession("t", 1, EPOCH))),
    OwnedSessions(()),
    Close(HANDLE),
    Heartbeat(1, 2.5, 3.25, 4, 5, 6, 7, True, 8.5, 9.25, busy_ms=10.5, read_bytes=7e20, running=8),
    Heartbeat(drain=DrainState.DRAIN),
    Heartbeat(),
    ModelFileRequest("tokenizer.json"),
    ModelFileChunk("tokenizer.json", 256, 1000, bytes(range(256)), False),
    ModelFileChunk("x", 0, 0, b"", True),
    CopyKv(HANDLE, EPOCH, NEIGHBOUR, 7, 2, 4),
    CopyKv(HANDLE, EPOCH, None),
    FindSession("s"),
    FindSession("s", claims=True, search_id=7),
    SessionInfo(
        "s",
        EPOCH,
        "g1/1/a",
        "10.0.0.1:8000",
        True,
        0.5,
        30_000.0,
        (HopInfo(0, 4, 9, 10, EPOCH), HopInfo(4, 8, 9, 0, EPOCH), HopInfo(8, 9, 3, 4, Epoch(2, 1))),
        Epoch(2, 1),
    ),
    SessionInfo("s", Epoch(0, 0), claimant="g2/1/a", search_id=7),
    SessionInfo("s", EPOCH, "g1/1/a", owner_silent_ms=math.inf, lease_ms=86_400_000.0),
    LogRequest("s"),
    LogRequest("s", EPOCH),
    LogChunk("s", EPOCH, 0, 300, tuple(range(300)), Turn(99, 100, SAMPLING)),
    LogChunk("s", EPOCH, 8, 9, (4,)),
    LogChunk("s", EPOCH, 8, 9, (1 << 31,), rows=bytes(range(8))),
    Input(5, EPOCH, 8, (1, (1 << 32) - 1), bytes(range(8))),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_round_trips(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


def test_message_table_covers_every_type() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(Message))


@pytest.mark.parametrize("refusal", Refusal)
def test_refusal_round_trips(refusal: Refusal) -> None:
    message = FenceAck(1, NO_HANDLE, EPOCH, refusal=refusal)
    assert decode(encode(message)) == message


@pytest.mark.parametrize("fault", FaultKind)
def test_fault_kind_round_trips(fault: FaultKind) -> None:
    message = FaultReport(1, EPOCH, fault)
    assert decode(encode(message)) == message


def test_detail_of_an_error_becomes_one_printable_line() -> None:
    report = FaultReport(1, EPOCH, FaultKind.FAILED, detail="CUDA error:\n\tbad\x00" + "é" * 2000)
    found = decode(encode(report))
    assert isinstance(found, FaultReport)
    assert found.detail == ("CUDA error:  bad " + "é" * 2000)[:MAX_TEXT]


@pytest.mark.parametrize("kind", [Lane, Role, Refusal, FaultKind])
def test_wire_enum_has_the_values_of_the_message_enum(kind: type[enum.Enum]) -> None:
    values = getattr(swarm_pb2, kind.__name__).keys()
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).upper() + "_"
    names = {value.removeprefix(prefix) for value in values} - {"UNSPECIFIED"}
    assert names == {member.name for member in kind}


def test_fields_of_a_newer_minor_version_are_skipped() -> None:
    newer = b"\xa8\x06\x05"  # field 101, varint 5
    inner = encode(Close(HANDLE))[2:] + newer
    assert decode(b"\x4a" + bytes([len(inner)]) + inner) == Close(HANDLE)


def make_envelope(**body: object) -> bytes:
    return swarm_pb2.Envelope(**body).SerializeToString()  # type: ignore[arg-type]


INVALID_SAMPLINGS = (
    Sampling(returned=ReturnedRows(3)),
    Sampling(grammar=Grammar("g", "v", 1), returned=ReturnedRows(3, logits=True)),
    Sampling(temperature=math.nan),
    Sampling(temperature=math.inf),
    Sampling(temperature=-1.0),
    Sampling(top_p=1.5),
    Sampling(min_p=-0.1),
    Sampling(typical_p=0.0),
    Sampling(repetition_penalty=0.0),
    Sampling(presence_penalty=math.nan),
    Sampling(frequency_penalty=math.inf),
    Sampling(logprobs=21),
    Sampling(prompt_logprobs=21),
    Sampling(prompt_logprobs=-2),
    Sampling(logit_bias=((1, math.nan),)),
    Sampling(logit_bias=((HUGE, 1.0),)),
    Sampling(logit_bias=((1, 1.0),) * (MAX_LOGIT_BIAS + 1)),
    Sampling(bad_words=((),)),
    Sampling(bad_words=((1,), (2, HUGE))),
    Sampling(bad_words=((1,) * (MAX_BAD_WORD_TOKENS + 1),)),
    Sampling(bad_words=((1,),) * (MAX_BAD_WORDS + 1)),
    Sampling(allowed_tokens=(HUGE,)),
    Sampling(allowed_tokens=(1,) * (MAX_ALLOWED_TOKENS + 1)),
    Sampling(grammar=Grammar("é" * (MAX_GRAMMAR_BYTES // 2 + 1), "llguidance 1.9.1")),
    Sampling(grammar=Grammar("", "two\nlines")),
    Sampling(grammar=Grammar("", "", MAX_FORCED_TOKENS + 1)),
)

INVALID = {
    "envelope without a body": b"",
    "body of an unknown kind": b"\xaa\x06\x00",
    "not protobuf": b"\xff\xff\xff\xff",
    "truncated message": encode(MESSAGES[2])[:-1],
    "text that is not UTF-8": b"\x5a\x03\x0a\x01\xff",
    "missing epoch": make_envelope(window=swarm_pb2.Window(handle=1)),
    "missing enum": make_envelope(
        fault_report=swarm_pb2.FaultReport(handle=1, epoch=swarm_pb2.Epoch(counter=1))
    ),
    "unknown enum": encode(FaultReport(4, EPOCH, FaultKind.GAP)).replace(b"\x18\x01", b"\x18\x63"),
    "version with one number": make_envelope(
        hello=swarm_pb2.Hello(version=[1], role=swarm_pb2.ROLE_SERVER, lane=swarm_pb2.LANE_LIVE)
    ),
    "neighbour without address": make_envelope(
        start_epoch=swarm_pb2.StartEpoch(
            handle=1, epoch=swarm_pb2.Epoch(), successor=swarm_pb2.Neighbour(handle=2)
        )
    ),
    "epoch above the maximum": encode(Window(1, Epoch(HUGE, 1), 1, 1)),
    "gateway above the maximum": encode(Fence(HANDLE, 4, Epoch(1, HUGE), 10, 11)),
    "position above the maximum": encode(Window(1, EPOCH, HUGE, 1)),
    "token above the maximum": encode(Input(1, EPOCH, 0, (1, HUGE, 2))),
    "nested epoch above the maximum": encode(
        SessionInfo("s", EPOCH, hops=(HopInfo(0, 4, 9, 10, Epoch(HUGE, 1)),))
    ),
    **{
        f"session with a lease of {lease} ms": encode(SessionInfo("s", EPOCH, lease_ms=lease))
        for lease in (-1.0, 1e15, math.inf, math.nan)
    },
    "session of a silence that is no number": encode(
        SessionInfo("s", EPOCH, owner_silent_ms=math.nan)
    ),
    **{
        f"detail with {text[:3]!r}": make_envelope(
            fault_report=swarm_pb2.FaultReport(
                handle=1,
                epoch=swarm_pb2.Epoch(counter=1),
                kind=swarm_pb2.FAULT_KIND_GAP,
                detail=text,
            )
        )
        for text in ("a\nERROR forged", "a\x1b[2J", "a\u2028b", "x" * 1025)
    },
    "owner with a line break": make_envelope(
        session_info=swarm_pb2.SessionInfo(session="s", epoch=swarm_pb2.Epoch(), owner="g\n1/1/a")
    ),
    **{
        f"sampling {n}": encode(LogChunk("s", EPOCH, 0, 1, (4,), Turn(9, 10, sampling)))
        for n, sampling in enumerate(INVALID_SAMPLINGS)
    },
    "empty fence": encode(Fence(NO_HANDLE, 4, EPOCH, 0, 0)),
    "fence that creates and truncates": encode(Fence(5, 4, EPOCH, 0, 0, Create("s", 0, 1), Turn(1, 2))),
    "fence that creates without a turn": encode(Fence(NO_HANDLE, 4, EPOCH, 0, 0, Create("s", 0, 1))),
}  # fmt: skip


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID.keys())
def test_invalid_envelope_raises_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data)
