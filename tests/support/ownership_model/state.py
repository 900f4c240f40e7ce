"""The states of the ownership model (R20, ownership): one session, some gateways, some servers, the lanes between them.

Everything is a tuple, so that states can be compared and hashed. A server has one hop at most, since it holds one range
of blocks. KV, rows, pages and routing costs are left out. An epoch is (counter, gateway number), as in the product. A
handle is named by the epoch of the Fence that made it: no gateway sends two creates of one epoch to one server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Epoch: TypeAlias = tuple[int, int]
Handle: TypeAlias = tuple[int, int]
Rank: TypeAlias = tuple[Epoch, Epoch]
Log: TypeAlias = tuple[int, ...]
Flags: TypeAlias = tuple[bool, ...]

NO_EPOCH: Epoch = (0, 0)
NO_GATEWAY = -1
NO_LIMIT = 1 << 60  # entries

# Phases of a hop.
FENCED, RUNNING, STOPPED = "fenced", "running", "stopped"
# States of a session at a gateway, beside RUNNING.
NONE, PARKED, FENCING, HELD = "none", "parked", "fencing", "held"
# Kinds of messages to servers, and to gateways.
FENCE, START, INPUT, CLOSE, OWNED, FIND = "fence", "start", "input", "close", "owned", "find"
ACK, INFO, TOKEN, REPORT = "ack", "info", "token", "report"
# Answers to a Fence.
GRANTED, UNKNOWN, STALE_EPOCH = "granted", "unknown", "stale_epoch"
# Times at which the question for the owner is due.
NEVER, LATER, NOW = 0, 1, 2


class Message(NamedTuple):
    """A message of any kind; fields that its kind does not have keep their defaults."""

    kind: str
    epoch: Epoch = NO_EPOCH
    handle: Handle | None = None  # Fence: None is a create. FenceAck: the server's handle
    run: Epoch = NO_EPOCH  # newest epoch that ran; FenceAck: epoch of the counters
    length: int = 0  # Fence: log cut. StartEpoch, FenceAck: entries. Input: start. Token: position
    log: Log = ()  # Input, Token
    answer: str = ""  # of a FenceAck
    rank: Rank | None = None  # FenceAck `stale_epoch`: of the owner
    owner: int = NO_GATEWAY  # SessionInfo
    flag: bool = False  # Close: relinquished. SessionInfo: has a hop. Token: the last one
    handles: tuple[Handle, ...] = ()  # OwnedSessions


class Hop(NamedTuple):
    """A hop at its server."""

    owner: int
    handle: Handle | None  # None: relinquished, so no gateway knows the handle
    epoch: Epoch
    run: Epoch = NO_EPOCH  # newest epoch known to have run
    was_started: bool = False
    started_by_owner: bool = False
    phase: str = FENCED
    log: Log = ()
    ran_log: int = 0  # entries that were here at the last cut; NO_LIMIT while the epoch runs
    counters: Epoch = NO_EPOCH  # newest epoch that was started here
    length: int = 0  # of the log, as the last StartEpoch stated

    @property
    def rank(self) -> Rank:
        return self.run, self.epoch

    @property
    def durable(self) -> Log:
        return self.log[: self.ran_log]


class Server(NamedTuple):
    """A server. `lapsed`: the gateway was silent for a lease; a message of it ends that."""

    linked: Flags
    lapsed: Flags
    hop: Hop | None = None
    claimant: int = NO_GATEWAY
    alive: bool = True


class View(NamedTuple):
    """A hop as its gateway sees it. `lost`: beside the route, on a server that lost its link."""

    handle: Handle | None = None
    cut: int = 0  # lowest cut since the last FenceAck
    created: Epoch = NO_EPOCH  # of the last create without an answer
    seen: Epoch = NO_EPOCH  # answers to earlier Fences are about an earlier creation
    fenced: bool = False
    length: int = 0  # of its log, as the FenceAck stated
    lost: bool = False


class Query(NamedTuple):
    """The question to all servers for the owner (R19, leases)."""

    run: Epoch  # newest one known to have run at the cut-off
    due: int
    route: Flags  # servers that are waited for without a link
    asked: bool = False
    waiting: bool = False
    unanswered: Flags = ()


class Gateway(NamedTuple):
    """A gateway and its session. `counter`: of the last session of that name that ended here."""

    state: str = NONE
    epoch: Epoch = NO_EPOCH
    found: Epoch = NO_EPOCH  # when it was opened: what ran below it is older
    run: Epoch = NO_EPOCH
    log: Log = ()
    views: tuple[View | None, ...] = ()
    closing: tuple[Epoch, ...] = ()  # creates that are closed when they are granted; by server
    query: Query | None = None
    has_run: bool = False
    recovering: bool = False
    contested: bool = False
    held: bool = False  # it was held since its last token
    counter: int = 0
    frozen: bool = False
    alive: bool = True

    @property
    def rank(self) -> Rank:
        return self.run, self.epoch

    @property
    def is_in_turn(self) -> bool:
        return self.state in (FENCING, RUNNING, HELD)


class Budget(NamedTuple):
    """Events that the environment may still cause."""

    turns: int = 2
    cuts: int = 1  # links that break
    expiries: int = 2  # leases, by gateway and server
    kills: int = 0  # gateways
    crashes: int = 0  # servers
    stalls: int = 0  # gateways that stop for more than a lease
    timeouts: int = 0  # Fences without an answer in time
    grants: int = 0  # hops that were never started and are freed


class State(NamedTuple):
    gateways: tuple[Gateway, ...]
    servers: tuple[Server, ...]
    lanes: tuple[tuple[Message, ...], ...]  # see `lane_of`
    budget: Budget
    read: Log = ()  # newest log that a client has read, unless a later turn has edited it
    holders: Flags = ()  # servers that had it when it was read
    fault: str = ""  # an invariant that the last transition broke


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of R19 and R20 (ownership); each can be switched off, and the model then finds the hole."""

    rank_by_run: bool = True  # what ran counts before what was only tried
    relinquishes: bool = True  # the lower rank leaves its hops for a takeover
    runs_by_token: bool = True  # a StartEpoch that was only sent counts as nothing
    waits_for_answer: bool = True  # no create at a server that has not answered
    asks_after_cut: bool = True  # a gateway that was cut off asks for the owner
    renews_handles: bool = True  # a taken hop has a new handle
    keeps_lost_hops: bool = True  # OwnedSessions lists hops of lost servers
    keeps_replaced_hops: bool = True  # a hop is closed when the route that replaces it has run
    drops_unrun: bool = True  # a cut drops the entries that have not run
    claims_names: bool = True  # a gateway that opens a name claims it first
    searches_all: bool = True  # a session is opened only if all servers have answered
    waits_for_lease: bool = True  # a name is opened anew only after the leases of its owners
    lease_protects: bool = True  # a started hop is its owner's while the lease runs


@dataclass(frozen=True, slots=True)
class World:
    """Bounds of one exhaustive search. `pipeline`: the route needs both servers; else each server holds all blocks."""

    pipeline: bool
    budget: Budget
    rules: Rules = Rules()
    max_epoch: int = 6
    max_messages: int = 6  # in flight, on all lanes
    slow_answers: bool = False  # a server with a link may answer a question too late
    slow_prompts: bool = False  # the entries of a prompt may arrive a lease after their StartEpoch
    edits: bool = True  # a later turn may replace the log
    n_gateways: int = 2
    n_servers: int = 2


LIVE, BULK, BACK = 0, 1, 2  # lanes of a gateway and a server


def lane_of(world: World, gateway: int, server: int, lane: int) -> int:
    return (gateway * world.n_servers + server) * 3 + lane


def initial(world: World) -> State:
    up, down = (True,) * world.n_gateways, (False,) * world.n_gateways
    gateway = Gateway(views=(None,) * world.n_servers, closing=(NO_EPOCH,) * world.n_servers)
    return State(
        gateways=(gateway,) * world.n_gateways,
        servers=(Server(up, down),) * world.n_servers,
        lanes=((),) * (3 * world.n_gateways * world.n_servers),
        budget=world.budget,
        holders=(False,) * world.n_servers,
    )


def put(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    """Return the tuple with one value replaced."""
    return (*values[:index], value, *values[index + 1 :])
