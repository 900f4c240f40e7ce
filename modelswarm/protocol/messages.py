"""Everything two processes of a swarm can say to each other, as plain values.

The cores (server, gateway) and the simulator speak only in these; `codec.py` turns them into the bytes of
`swarm.proto` and `frames.py`. Rule numbers (R1 ...) are those of docs/protocol.md.

In every message `handle` is the *addressee's* own name for the hop: a server's in what a gateway or another
server sends, the gateway's (`Fence.reply`) in what a server sends to a gateway.
Positions are absolute indices into the session's input log; ranges are half-open.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from modelswarm.protocol.identity import NO_HANDLE, Address, Epoch, Handle, PeerId

PROTOCOL_VERSION = (1, 0)
"""(major, minor). One minor apart works; anything else is refused, naming both."""


class Lane(enum.Enum):
    """The two connections of a link."""

    LIVE = "live"  # control, decode rows, tokens
    BULK = "bulk"  # prefill, replay, bodies of inputs, model files


class Role(enum.Enum):
    SERVER = "server"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on each lane, both ways."""

    version: tuple[int, int]
    peer: PeerId
    role: Role
    link: str  # joins the two lanes of one link; chosen by the dialler, echoed by the acceptor
    lane: Lane
    target: str = ""  # where this process can be dialled
    model: str = ""  # what a server serves; empty for a gateway
    revision: str = ""
    first: int = 0  # blocks [first, last) of n_blocks
    last: int = 0
    n_blocks: int = 0
    dtype: str = ""
    row_bytes: int = 0  # bytes of one row at a block boundary
    max_length: int = 0  # most positions one session may have
    total_pages: int = 0
    page_size: int = 0  # positions a page holds
    hold_ms: int = 0  # a session of this model may be held so long; 0: as the gateway sees fit
    zone: str = ""  # failure domain; empty: not known. Repairs prefer another one
    lease_ms: int = 0  # what it was started with (R19); 0: it does not say
    beat_ms: int = 0  # between signs of life of a server with sessions (R21); 0: it does not say


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tail picks a token. Same (logits, params, log, position) gives the same token (I4, R17)."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # unsigned 64 bit
    choice: int = 0
    eos: tuple[int, ...] = ()  # tokens that end the sequence; empty: none does
    logprobs: int = 0  # reserved: how many top alternatives to report


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of a session needs from every hop."""

    reserve: int  # KV positions to hold pages for, at least `end - 1`
    end: int  # the log never grows beyond `end` entries; its last one finishes with LENGTH
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Create:
    """The part of a Fence that opens a hop (idempotent per session and block range, R2)."""

    session: str
    first: int
    last: int
    repair: bool = False  # may use the pages kept for repairs (R12)
    page_hashes: tuple[bytes, ...] = ()  # reserved for the prefix cache (R16)


@dataclass(frozen=True, slots=True)
class Fence:
    """The only cut and the only open (R2, R3). Exactly one of `handle` and `create` is set."""

    handle: Handle
    reply: Handle  # the gateway's name for this hop
    epoch: Epoch
    kv_cut: int
    log_cut: int
    create: Create | None = None
    turn: Turn | None = None  # always with `create`; otherwise when a new turn begins
    branch: int = 0  # reserved: speculative rollback
    ran: Epoch | None = None  # the last one that Go was said for; None: this one may have run (R20)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a hop had seen of an epoch when the first Fence after its Go came; for blame (R5)."""

    epoch: Epoch
    received: int  # next row position expected from the predecessor (head: from Input and ring)
    sent: int  # next row position to send to the successor
    granted: int  # row limit this hop last granted to its predecessor
    window: int  # row limit its successor last granted to it
    tokens_sent: int  # ring: next token position the tail would send to the head
    tokens_received: int  # ring: next token position the head expects


class Refusal(enum.Enum):
    NO_PAGES = "no_pages"
    TOO_LONG = "too_long"  # reserve above what this server can ever hold
    WRONG_BLOCKS = "wrong_blocks"
    DRAINING = "draining"
    OUTRANKED = "outranked"  # another gateway has the session, in a higher epoch: hands off (R20)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """A run of the replay log: rows [start, end) at a block boundary (R6)."""

    boundary: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The answer to a Fence, once the step that was running has retired."""

    handle: Handle  # the gateway's
    own: Handle  # the server's, for what follows; NO_HANDLE when refused or unknown
    epoch: Epoch
    kv: int = 0  # positions [0, kv) hold valid KV
    log: int = 0  # entries of the log copy (head and tail), else 0
    counters: Counters | None = None
    kept: tuple[KeptRows, ...] = ()
    steps: int = 0  # the engine's step counter
    refused: Refusal | None = None
    free_pages: int = 0
    unknown: bool = False  # no such handle here
    held: Epoch | None = None  # refused as outranked: in which epoch the other gateway has it


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A hop as another hop addresses it."""

    address: Address
    handle: Handle


@dataclass(frozen=True, slots=True)
class Go:
    """Start running an epoch from agreed positions (R6). A second Go of an epoch is ignored."""

    handle: Handle
    epoch: Epoch
    length: int  # L; n = L - 1 is the first position that is sampled after
    start: int  # cut this hop's KV here and run rows from here
    send_from: int  # first row position the successor lacks
    predecessor: Neighbour | None  # None: this hop is the head
    successor: Neighbour | None  # None: this hop is the tail
    ring: Neighbour | None  # tail only: the head, for sampled tokens; None in a route of one hop
    credit: int  # tail only: tokens at positions < credit may enter the ring (R7)
    hops: int = 1
    sample: bool = True  # False: only read the log up to n (max_tokens = 0)
    warm: bool = False
    """A copy of `predecessor` (R13): keep what it sends, say nothing but Windows, one also to the gateway."""


@dataclass(frozen=True, slots=True)
class Input:
    """Log entries [start, start + len(tokens)) for the head (which runs them) or the tail (which stores them)."""

    handle: Handle
    epoch: Epoch
    start: int
    tokens: tuple[int, ...]


class Finish(enum.Enum):
    NONE = ""
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token: log entry `position`. Goes to the gateway always, into the ring up to the credit.

    `token` is -1 when nothing was to be sampled (`Go.sample` false): the log has been read.
    The finishing token is `store_only` for the head: it is logged but not run.
    """

    handle: Handle
    epoch: Epoch
    position: int
    token: int
    logprob: float = 0.0
    finish: Finish = Finish.NONE
    store_only: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """Absolute limits (R7, R11); only ever raised within an epoch, reset by Fence, kept until Go (R10).

    From a hop to its predecessor: rows below `received` have arrived, rows below `limit` may be sent.
    From the gateway to the tail: tokens at positions below `limit` may enter the ring.
    From a warm hop to the hop that it is a copy of (`copy`): the same, of positions; to its gateway: KV for positions
    below `received` is there.
    """

    handle: Handle
    epoch: Epoch
    received: int
    limit: int
    committed: int = 0  # reserved for the prefix cache (R16)
    page_hashes: tuple[bytes, ...] = ()
    copy: bool = False


class Trouble(enum.Enum):
    GAP = "gap"
    LINK_DOWN = "link_down"
    DRAINING = "draining"
    OVERDUE = "overdue"
    UNKNOWN_HANDLE = "unknown_handle"
    FAILED = "failed"  # the model's step failed for this session


@dataclass(frozen=True, slots=True)
class Report:
    """A hop tells the gateway what is wrong with an epoch."""

    handle: Handle  # the gateway's
    epoch: Epoch
    trouble: Trouble
    peer: PeerId = ""  # the other end of the link it is about; "" when about this server itself
    generation: int = 0  # of that link, to count a pair's failure once (R5)
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LiveSession:
    session: str
    handle: Handle
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Live:
    """On every (re)connect: all hops this gateway owns at the server, which frees the rest of them."""

    sessions: tuple[LiveSession, ...]


@dataclass(frozen=True, slots=True)
class Close:
    handle: Handle


@dataclass(frozen=True, slots=True)
class Copy:
    """R13: stream the KV of blocks [first, last) from position `start` on, and of every position that follows, to `to`.

    On bulk, within the window that `to` grants, until the epoch ends or a Copy of it without a target comes. Several
    targets, for parts of the blocks, run side by side.
    """

    handle: Handle  # of the hop that is copied
    epoch: Epoch
    to: Neighbour | None
    start: int = 0
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Find:
    """Gateway to any server: what do you hold of this session (R20)?"""

    session: str
    opens: bool = False  # who asks is about to open or adopt it, if nobody else is
    number: int = 0  # of the search; the answer has it too


@dataclass(frozen=True, slots=True)
class FoundHop:
    first: int
    last: int
    kv: int
    log: int  # entries of the log copy; 0 where there is none
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to Find: the hops of the session here, none if it is not known, and who owns it."""

    session: str
    epoch: Epoch
    owner: PeerId = ""  # the gateway
    target: str = ""  # as the owner's Hello said: where other gateways reach its HTTP door
    linked: bool = False  # the owner's link is up
    gone_ms: float = 0.0  # since it was last heard
    lease_ms: float = 0.0  # after so long it may be adopted
    hops: tuple[FoundHop, ...] = ()  # of that epoch
    older: tuple[FoundHop, ...] = ()  # of epochs since `ran`
    ran: Epoch | None = None  # the newest that is known here to have run; None: `epoch`
    opener: PeerId = ""  # another gateway that was about to open it, and said so here first
    number: int = 0  # of the Find


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Gateway to a server that holds a log copy: send it (R20)."""

    session: str
    epoch: Epoch | None = None  # of the hop whose copy is meant; None: the newest


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Log entries [start, start + len(tokens)) of `total`, on bulk. The first carries the turn; total 0: none here."""

    session: str
    epoch: Epoch
    start: int
    total: int
    tokens: tuple[int, ...]
    turn: Turn | None = None


class Wish(enum.Enum):
    """Whether sessions are to be on a server (`modelswarm drain`)."""

    LEAVE = "leave"
    STAY = "stay"


@dataclass(frozen=True, slots=True)
class Beat:
    """Status of a process (R21); from a gateway it renews the leases of its sessions (R19), or gives them up."""

    steps: int = 0
    oldest_ready_ms: float = 0.0  # age of the oldest row that waits for a step or is in one
    step_ms: float = 0.0  # running mean
    free_pages: int = 0
    total_pages: int = 0
    sessions: int = 0
    rows: int = 0  # total rows run so far
    draining: bool = False
    stepping_ms: float = 0.0  # how long the step that runs has run; 0: none runs
    step_p99_ms: float = 0.0  # of the last hundred steps or so
    busy_ms: float = 0.0  # in steps so far, stalls included: with `steps` and `rows`, its pace
    running: int = 0  # of its sessions, in a turn now: what a router takes as load
    wish: Wish | None = None  # a gateway's: a new one; a server's: the last one of all gateways


@dataclass(frozen=True, slots=True)
class ModelFileRequest:
    """Gateway to server: tokenizer, template and configuration files, by file name."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelFileChunk:
    name: str
    offset: int
    total: int  # bytes; 0 and `missing` when there is no such file
    data: bytes
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, first + count) of one session at the addressee's first boundary; raw bytes, row-major.

    `payload` holds count x row_bytes bytes. Only a row at position n or later carries `sample`, always as the last
    row of its group: the tail samples after it. With `store_only` it is a copy's (R13): of each position the KV of the
    addressee's blocks, block by block, and then, in all of the group or in none, the output row that the sender kept.
    """

    handle: Handle
    epoch: Epoch
    first: int
    count: int
    payload: bytes | memoryview
    sample: bool = False
    store_only: bool = False


Message: TypeAlias = (
    Hello
    | Fence
    | Fenced
    | Go
    | Input
    | Window
    | Report
    | Live
    | Close
    | Beat
    | ModelFileRequest
    | ModelFileChunk
    | Copy
    | Find
    | Found
    | LogRequest
    | LogChunk
)
"""Control: protobuf on the wire. Hello is consumed by the link itself; the cores never see it as a message."""

Item: TypeAlias = Message | Rows | Token
"""Anything a link carries: control, or packed Rows and Token groups."""


@dataclass(frozen=True, slots=True)
class Send:
    """An effect of either core: put `item` on a lane of the link to `to`.

    The shell dials `to` if no link is up, keeps per-lane order, and packs neighbouring Rows (or Tokens) for the same
    lane into one frame. If the link is or goes down, the item is lost and the core hears `disconnected`.
    """

    to: Address
    lane: Lane
    item: Item


def reply_address(peer: PeerId) -> Address:
    """The address of a peer that can only be answered on the link it opened itself."""
    return Address(peer, "")


__all__ = [
    "NO_HANDLE",
    "PROTOCOL_VERSION",
    "Beat",
    "Close",
    "Copy",
    "Counters",
    "Create",
    "Fence",
    "Fenced",
    "Find",
    "Finish",
    "Found",
    "FoundHop",
    "Go",
    "Hello",
    "Input",
    "Item",
    "KeptRows",
    "Lane",
    "Live",
    "LiveSession",
    "LogChunk",
    "LogRequest",
    "Message",
    "ModelFileChunk",
    "ModelFileRequest",
    "Neighbour",
    "Refusal",
    "Report",
    "Role",
    "Rows",
    "Sampling",
    "Send",
    "Token",
    "Trouble",
    "Turn",
    "Window",
    "Wish",
    "reply_address",
]
