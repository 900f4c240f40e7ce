"""All messages between two processes of a swarm, as plain values.

The cores (server, gateway) and the simulator exchange only these; `wire/codec.py` and `wire/frames.py` encode them.
R1 ... are rules of docs/protocol.md. In every message `handle` is the *addressee's* own name for the hop: the server's,
or to a gateway its own (`Fence.gateway_handle`). Positions are absolute indices into the input log; ranges half-open.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from modelswarm.protocol.identity import (
    NO_HANDLE,
    Adapter,
    Address,
    BlockRange,
    Epoch,
    ForkSource,
    Handle,
    PeerId,
)
from modelswarm.protocol.model_files import ModelFileChunk, ModelFileRequest
from modelswarm.protocol.sampling import (
    MAX_FORCED_TOKENS,
    MAX_LOGPROBS,
    Grammar,
    PromptLogprob,
    PromptLogprobs,
    ReturnedRows,
    Sampling,
    TopLogprob,
)
from modelswarm.protocol.session_search import FindSession, HopInfo, SessionInfo

PROTOCOL_VERSION = (2, 4)
"""(major, minor). Peers one minor version apart work together; any other pair is refused, naming both versions."""


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
    link: str  # id of the link, equal on both lanes; chosen by the dialer, echoed by the acceptor
    lane: Lane
    target: str = ""  # host:port at which this process accepts links
    model: str = ""  # served model; empty for a gateway
    revision: str = ""
    first: int = 0  # blocks [first, last) of n_blocks
    last: int = 0
    n_blocks: int = 0
    dtype: str = ""
    row_bytes: int = 0  # bytes of one row at a block boundary
    max_length: int = 0  # maximum positions of one session
    total_pages: int = 0
    page_size: int = 0  # positions per page
    hold_ms: int = 0  # hold limit of this model's sessions; 0: the gateway's own limit
    zone: str = ""  # failure domain; empty: unknown. Recovery prefers another zone
    lease_ms: int = 0  # session lease of this server (R19, leases); 0: not given
    heartbeat_ms: int = 0  # interval of a busy server (R21, failure detection); 0: not given
    replaces: tuple[PeerId, ...] = ()  # gateways whose processes have ended (R19, leases)
    grammar: str = ""  # library and version by which a tail constrains answers; empty: it cannot
    logit_bytes: int = 0  # of a row of logits that a tail returns; 0: it returns none
    hidden_bytes: int = 0  # of a row of last hidden states that a tail returns; 0: it returns none
    numerics: str = ""  # numerics class: device, torch and dtype; empty: unknown
    adapters: tuple[Adapter, ...] = ()  # that sessions may name


@dataclass(frozen=True, slots=True)
class Turn:
    """Requirements of one turn of a session, equal for every hop."""

    reserved_positions: int  # KV positions that need pages, at least `end - 1`; 0: see R8 (parked)
    end: int  # maximum log length in entries; the last entry finishes with LENGTH
    sampling: Sampling = field(default_factory=Sampling)
    begin: int = 0  # log length at which the turn began: the length of its prompt
    session_length: int = 0  # positions reserved for the whole session; 0: only those of its turns
    session_ttl: int = 0  # seconds that the session is kept without a turn; 0: the gateway's own
    blocks: BlockRange | None = None  # of the whole session; None: tokens in and out of all blocks
    adapter: Adapter | None = None  # of the whole session; None: the model as it is
    only_rows: bool = False  # rows are returned, that of the last entry too, and nothing is sampled
    prompt_rows: int = 0  # first entries, each with a row for every block (R14, opaque rows)


@dataclass(frozen=True, slots=True)
class Create:
    """The part of a Fence that opens a hop. Idempotent per session and block range (R2, fencing)."""

    session: str
    first: int
    last: int
    for_recovery: bool = False  # may use the pages reserved for recovery (R12, admission)
    page_hashes: tuple[bytes, ...] = ()  # reserved (R16, prefix cache); not used yet
    parent: ForkSource | None = None  # None: the hop starts empty


@dataclass(frozen=True, slots=True)
class Fence:
    """The only message that truncates or opens hops (R2: fencing, R3: lowest cuts). Has either `handle` or `create`."""

    handle: Handle
    gateway_handle: Handle  # the gateway's handle of this hop
    epoch: Epoch
    kv_cut: int
    log_cut: int
    create: Create | None = None
    turn: Turn | None = None  # set with `create`, and when a new turn begins
    branch: int = 0  # reserved: speculative rollback
    last_started: Epoch | None = None  # newest epoch known to have run (R20, takeover)


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a hop, frozen at the first Fence after a StartEpoch; input of fault attribution (R5, one loop)."""

    epoch: Epoch
    received: int  # next row position expected from the predecessor (head: from Input and ring)
    sent: int  # next row position to send to the successor
    granted: int  # row limit that this hop last granted to its predecessor
    window: int  # row limit that the successor last granted to this hop
    tokens_sent: int  # ring: next token position that the tail sends to the head
    tokens_received: int  # ring: next token position that the head expects
    unsent: int = 0  # rows that wait until the bulk rows are acknowledged (R9, one lane at a time)


class Refusal(enum.Enum):
    NO_PAGES = "no_pages"
    TOO_LONG = "too_long"  # the reservation exceeds all pages of this server
    WRONG_BLOCKS = "wrong_blocks"
    DRAINING = "draining"
    STALE_EPOCH = "stale_epoch"  # another gateway owns it in a higher epoch (R20, takeover)
    NO_ADAPTER = "no_adapter"  # this server lacks the turn's; only sent to peers that name one


@dataclass(frozen=True, slots=True)
class RetainedRows:
    """A contiguous run of the replay log: rows [start, end) at a block boundary (R6, replay)."""

    boundary: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FenceAck:
    """Acknowledges a Fence, after the running step has retired."""

    handle: Handle  # the gateway's
    server_handle: Handle  # the server's, for later messages; NO_HANDLE when refused or unknown
    epoch: Epoch
    kv: int = 0  # positions [0, kv) hold valid KV
    log: int = 0  # entries of the log copy (head and tail), else 0
    counters: Counters | None = None
    retained: tuple[RetainedRows, ...] = ()
    steps: int = 0  # the engine's step counter
    refusal: Refusal | None = None
    free_pages: int = 0
    unknown: bool = False  # no such handle here
    owner_epoch: Epoch | None = None  # with STALE_EPOCH: epoch in which the other gateway owns it
    owner_last_started: Epoch | None = None  # and the newest epoch that ran there, if one did
    paused: bool = False  # with NO_PAGES: no new work is admitted for a while, however much is free


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Address of a hop for another hop."""

    address: Address
    handle: Handle


@dataclass(frozen=True, slots=True)
class StartEpoch:
    """Starts an epoch from agreed positions (R6, replay). A second StartEpoch of an epoch is ignored."""

    handle: Handle
    epoch: Epoch
    length: int  # L; the tail samples first after position n = L - 1
    start: int  # truncate this hop's KV to this position and run rows from it
    send_from: int  # first row position that the successor lacks
    predecessor: Neighbour | None  # None: this hop is the head
    successor: Neighbour | None  # None: this hop is the tail
    ring: Neighbour | None  # tail only: the head, for sampled tokens; None in a route of one hop
    credit: int  # tail only: tokens at positions < credit may enter the ring (R7, credit)
    hops: int = 1
    sample: bool = True  # False: run the log up to n and sample nothing (max_tokens = 0)
    standby: bool = False
    """This hop is the KV copy of `predecessor` (R13, migration). It stores what arrives and sends only Windows."""


@dataclass(frozen=True, slots=True)
class Input:
    """Log entries [start, start + len(tokens)). The head runs them, the tail stores them.

    A hop between them gets those entries below `Turn.prompt_rows` that it is to run, with the rows of its own blocks.
    """

    handle: Handle
    epoch: Epoch
    start: int
    tokens: tuple[int, ...]
    rows: bytes = b""  # of the opaque ones among them (R14, opaque rows)


class Finish(enum.Enum):
    NONE = ""
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token, log entry `position`, and the tokens that its grammar forces after it: one group.

    Sent to the gateway, and into the ring if the credit covers the whole group. Logged as a whole or not at all.
    `token` is -1 when nothing is sampled (`StartEpoch.sample` is false): the log has been run.
    `finish` belongs to the last entry. That one is `store_only` for the head if it finishes the turn: logged, not run.
    """

    handle: Handle
    epoch: Epoch
    position: int
    token: int
    logprob: float = 0.0
    finish: Finish = Finish.NONE
    store_only: bool = False
    top: tuple[TopLogprob, ...] = ()  # to the gateway only: the most probable ones, falling
    forced: tuple[int, ...] = ()  # entries from position + 1 on; at most MAX_FORCED_TOKENS

    @property
    def group(self) -> tuple[int, ...]:
        """Log entries [position, group_end)."""
        return (self.token, *self.forced)

    @property
    def group_end(self) -> int:
        return self.position + 1 + len(self.forced)


@dataclass(frozen=True, slots=True)
class Window:
    """Absolute limits of flow control (R7: credit, R11: windows).

    They only rise within an epoch, are reset by Fence, and stay until StartEpoch (R10, nothing overtakes StartEpoch).
    From a hop to its predecessor: rows below `received` have arrived, rows below `limit` may be sent.
    From the gateway to the tail: tokens at positions below `limit` may enter the ring.
    With `kv_copy`, from a standby hop to the hop that it copies: the same, counted in positions. To its gateway: the KV
    of positions below `received` is complete.
    """

    handle: Handle
    epoch: Epoch
    received: int
    limit: int
    committed: int = 0  # reserved (R16, prefix cache); not used yet
    page_hashes: tuple[bytes, ...] = ()
    kv_copy: bool = False


class FaultKind(enum.Enum):
    GAP = "gap"
    LINK_DOWN = "link_down"
    DRAINING = "draining"
    UNKNOWN_HANDLE = "unknown_handle"
    FAILED = "failed"  # the model step failed for this session
    NOT_FINITE = "not_finite"  # its logits have a NaN or an infinity
    NO_TOKEN = "no_token"  # its sampling parameters leave no token to sample


@dataclass(frozen=True, slots=True)
class FaultReport:
    """A hop reports a fault of an epoch to the gateway."""

    handle: Handle  # the gateway's
    epoch: Epoch
    kind: FaultKind
    peer: PeerId = ""  # other end of the faulty link; empty when the fault is this server's own
    generation: int = 0  # of that link, so that a pair's failure is counted once (R5, one loop)
    detail: str = ""


@dataclass(frozen=True, slots=True)
class OwnedSession:
    session: str
    handle: Handle
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class OwnedSessions:
    """All hops that this gateway owns at the server, sent on every (re)connect. The server frees its other hops."""

    sessions: tuple[OwnedSession, ...]


@dataclass(frozen=True, slots=True)
class Close:
    handle: Handle
    relinquished: bool = False  # a hop that has run stays, without an owner (R20, ownership)


@dataclass(frozen=True, slots=True)
class CopyKv:
    """Streams the KV of blocks [first, last), from position `start` onwards, to `to` (R13, migration).

    The transfer uses the bulk lane within the window that `to` grants. It ends with the epoch, or by a CopyKv without
    a target. Several targets, for parts of the blocks, are served side by side.
    """

    handle: Handle  # of the source hop
    epoch: Epoch
    to: Neighbour | None
    start: int = 0
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class LogRequest:
    """A gateway asks a server for its log copy (R20, takeover)."""

    session: str
    epoch: Epoch | None = None  # of the hop that holds the copy; None: the newest


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Log entries [start, start + len(tokens)) of `total`, on bulk. The first carries the turn. Total 0: no copy."""

    session: str
    epoch: Epoch
    start: int
    total: int
    tokens: tuple[int, ...]
    turn: Turn | None = None
    rows: bytes = b""  # of the opaque entries among `tokens`


class DrainState(enum.Enum):
    """Drain request for a server (`modelswarm drain`): DRAIN moves its sessions away, SERVE ends the drain."""

    DRAIN = "drain"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Status of a process (R21, failure detection). A gateway's renews or releases its session leases (R19, leases)."""

    steps: int = 0
    oldest_ready_ms: float = 0.0  # age of the oldest row that is waiting or running
    step_ms: float = 0.0  # running mean
    free_pages: int = 0
    total_pages: int = 0
    sessions: int = 0
    rows: int = 0  # total rows run so far
    draining: bool = False
    stepping_ms: float = 0.0  # age of the running step; 0: none is running
    step_p99_ms: float = 0.0  # of about the last hundred steps
    busy_ms: float = 0.0  # total time in steps with stalls; `steps`, `rows` give step times
    read_bytes: float = 0.0  # of weights and KV in one block, by these steps
    running: int = 0  # sessions in a turn now: the load for route choice
    drain: DrainState | None = None  # from a gateway: a request; from a server: the latest request


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, first + count) of one session at the addressee's first boundary; raw bytes, row-major.

    `payload` holds count x row_bytes bytes. Only a row at position n or later carries `sample`, as the last one of
    its group. The tail samples after it if its log ends there. The rows of a token's group may come together.
    To a gateway: what `Sampling.returned` asks of the tail, `payload` in the form that is described there.
    With `kv_copy` the rows are part of a KV transfer (R13, migration). Each position then holds the KV of the
    addressee's blocks, block by block, and after it the output row from the sender's replay log. All positions of the
    item have that row, or none has it.
    """

    handle: Handle
    epoch: Epoch
    first: int
    count: int
    payload: bytes | memoryview
    sample: bool = False
    kv_copy: bool = False


Message: TypeAlias = (
    Hello
    | Fence
    | FenceAck
    | StartEpoch
    | Input
    | Window
    | FaultReport
    | OwnedSessions
    | Close
    | Heartbeat
    | ModelFileRequest
    | ModelFileChunk
    | CopyKv
    | FindSession
    | SessionInfo
    | LogRequest
    | LogChunk
)
"""Control messages: protobuf on the wire. The link consumes Hello; the cores never receive it as a message."""

Item: TypeAlias = Message | Rows | Token | PromptLogprobs
"""Everything a link carries: control messages, or packed Rows, Tokens and PromptLogprobs."""


@dataclass(frozen=True, slots=True)
class Send:
    """Effect of either core: queue `item` on a lane of the link to `to`.

    The shell dials `to` if no link is up and keeps the order per lane. It packs adjacent Rows (or Tokens) of a lane
    into one frame. If the link fails, the item is lost and the core is told that the peer was lost.
    """

    to: Address
    lane: Lane
    item: Item


def reply_address(peer: PeerId) -> Address:
    """Returns the address of a peer that is reachable only over the link that it opened itself."""
    return Address(peer, "")


__all__ = [
    "MAX_FORCED_TOKENS",
    "MAX_LOGPROBS",
    "NO_HANDLE",
    "PROTOCOL_VERSION",
    "Adapter",
    "BlockRange",
    "Close",
    "CopyKv",
    "Counters",
    "Create",
    "DrainState",
    "FaultKind",
    "FaultReport",
    "Fence",
    "FenceAck",
    "FindSession",
    "Finish",
    "Grammar",
    "Heartbeat",
    "Hello",
    "HopInfo",
    "Input",
    "Item",
    "Lane",
    "LogChunk",
    "LogRequest",
    "Message",
    "ModelFileChunk",
    "ModelFileRequest",
    "Neighbour",
    "OwnedSession",
    "OwnedSessions",
    "PromptLogprob",
    "PromptLogprobs",
    "Refusal",
    "RetainedRows",
    "ReturnedRows",
    "Role",
    "Rows",
    "Sampling",
    "Send",
    "SessionInfo",
    "StartEpoch",
    "Token",
    "TopLogprob",
    "Turn",
    "Window",
    "reply_address",
]
