"""The parts of a simulated world: the swarm's layout, its conditions, its faults and the load of its clients.

Plain values; `scenarios/base.py` draws them from a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

NEVER = float("inf")

CODEC_SHARE = 1 / 8  # of the worlds, which take a quarter longer

# Faults that nothing reports: only a deadline ends what they hold up.
SILENT_FAULTS = frozenset(
    (
        *("freeze", "stop", "stop_gateway", "stop_long"),
        *("delay_direction", "partition", "cut_off", "part_linked"),
    )
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes and their sizes."""

    n_blocks: int
    spans: tuple[tuple[int, int], ...]  # one entry per server
    page_size: int
    total_pages: int
    max_length: int
    token_budget: int
    row_window: int
    in_flight_bytes: int = 32 << 20  # limit of rows from one peer to a server on the bulk lane
    gateways: int = 1
    max_input_tokens: int = 8192  # per Input message
    max_live_input_tokens: int = 256  # Input messages up to this length go on the live lane
    grant_seconds: float = NEVER
    lease_seconds: float = NEVER
    replay_bytes: int = 1 << 20  # for retained rows, at each server
    fork_step_bytes: int = 8 << 20  # of KV that a step copies for forks (R15)
    announce_seconds: float = 0.0  # until further servers of a span are announced


@dataclass(frozen=True, slots=True)
class Conditions:
    """Delays and failures of messages and steps; times in seconds."""

    latency: float = 0.0005  # mean, exponential
    bulk_factor: float = 1.0  # the bulk lane is slower by this factor
    spike_chance: float = 0.0  # of one message being late by up to `spike`
    spike: float = 0.2
    duplicate_chance: float = 0.0
    duplicate_delay: float = 0.01
    step_seconds: float = 0.001
    row_seconds: float = 0.0  # added to a step for each of its rows
    slow_step_chance: float = 0.0
    slow_step: float = 0.5
    failed_step_chance: float = 0.0
    evict_chance: float = 0.0  # of retained rows being dropped after the FenceAck that lists them
    link_down_delay: float = 0.003  # mean time until one side learns that a link broke
    max_lane_bytes: float = NEVER  # of rows in flight on a lane: a real lane ends beyond it
    slow_link_down_chance: float = 0.2  # of one side learning it `slow_link_down_delay` later
    slow_link_down_delay: float = 0.3
    dial_seconds: float = 1.0  # at most, until a dial without an answer fails


@dataclass(frozen=True, slots=True)
class Faults:
    """The schedule of injected faults, and their kinds with relative weights."""

    until: float = 0.0  # none after this time
    max_count: int = 1_000_000
    mean_gap: float = 0.05  # seconds between faults
    burst_chance: float = 0.3  # of another fault after `burst_gap`: inside the recovery loop
    burst_gap: float = 0.002
    weights: dict[str, float] = field(default_factory=dict)  # by kind, see `faults.py`
    restart_seconds: float = 0.05  # mean time until a killed server restarts
    permanent_chance: float = 0.0  # of a killed server never restarting, if others hold its blocks
    new_span_chance: float = 0.0  # of a killed server restarting with other blocks
    undetected_chance: float = 0.0  # of a parted pair keeping links that lose one direction


@dataclass(frozen=True, slots=True)
class Load:
    """The sessions of the clients, and what each does."""

    sessions: int = 5  # per gateway that starts
    max_sessions: int = 1_000_000  # of all gateways together
    start_seconds: float = 0.3  # all sessions start within this time
    turns: int = 2
    prompt: tuple[int, int] = (1, 12)
    max_tokens: tuple[int, int] = (1, 16)
    no_limit_chance: float = 0.03  # of a turn with `max_tokens` None
    think_seconds: float = 0.02
    rewind_chance: float = 0.2
    stop_chance: float = 0.1
    close_chance: float = 0.1
    quit_chance: float = 0.1  # of closing the session after a refusal
    eos_chance: float = 0.2
    sampled_chance: float = 0.5
    has_rules: bool = False  # sampled turns have penalties, a bias and masks
    has_grammars: bool = False  # two of three turns have a grammar, most of them with forced tokens
    has_rows: bool = False  # opaque rows in inputs and answers; some sessions have only these
    has_block_rows: bool = False  # logs begin with rows for each block, instead of those
    resumes_turns: bool = False  # streams break, and clients resume their turns, here or elsewhere
    slow_reader_chance: float = 0.1
    read_seconds: float = 0.01  # mean time that a slow reader takes for a token
    reserves: bool = False  # two of three sessions are opened with all their positions reserved
    fork_chance: float = 0.0  # of a fork, for each token that a client gets
    poisoned: int = 0  # the first so many sessions make the model fail
    poison_chance: float = 0.0  # of a failure, for each step of such a session

    @property
    def sends_rows(self) -> bool:
        """True if logs may have opaque entries (R14)."""
        return self.has_rows or self.has_block_rows

    def is_poisoned(self, session: str) -> bool:
        return int(session[1:]) < self.poisoned


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world. `name` is the kind of trouble, `seed` chooses the details."""

    seed: int
    name: str
    layout: Layout
    conditions: Conditions
    faults: Faults
    load: Load
    # Settings of the gateways, as in `GatewaySettings`.
    fence_timeout_seconds: float = NEVER
    fence_ack_seconds: float = 0.3
    suspect_after_seconds: float = 0.3
    token_timeout_seconds: float = 1.0
    copy_attempts: int = 3  # 0: sessions migrate without KV copies
    rebalance_after_seconds: float = 60.0
    hold_limit_seconds: float = NEVER  # finite: a session may be lost
    can_take_over: bool = False  # clients of a lost gateway go on at another one (R20, takeover)
    forwards_requests: bool = False  # to the owner of a session, instead of closing it there
    has_rivals: bool = False  # other requests for a lost gateway's sessions, at other gateways
    return_seconds: float = 0.5  # a client comes to another gateway within this time
    kept_leases: float = 1.5  # hops of lost gateways remain for so long; 1 where pages are short
    has_supervisor: bool = False  # a restarted gateway names those before it (R19, leases)
    max_overdues: float = NEVER  # overdue tokens of a session in a row
    max_wait_seconds: float = 12.0  # a session without progress for so long has stalled
    max_starvation_seconds: float = 10.0  # without a token for any of the sessions that wait
    max_ownerless_seconds: float = NEVER  # of a session whose client waits, after the last fault
    max_excuse_seconds: float = 0.5  # from a disturbance of a server to its ejection
    vocab: int = 4093

    @property
    def encodes_messages(self) -> bool:
        """True if messages become bytes on their way; nothing else of the world depends on it."""
        return random.Random(f"wire/{self.name}/{self.seed}").random() < CODEC_SHARE

    @property
    def has_only_drains(self) -> bool:
        """True if servers are only drained, so that no session may see a fault."""
        return set(self.faults.weights) == {"drain_request"}

    @property
    def has_silent_faults(self) -> bool:
        """True if something may be held up that nothing reports: only a deadline ends it."""
        conditions = self.conditions
        return bool(
            SILENT_FAULTS & set(self.faults.weights)
            or conditions.slow_step_chance
            or conditions.spike_chance
        )
