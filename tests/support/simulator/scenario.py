"""What a world is made of: the swarm's shape, its weather, the faults that strike it and what its clients do.

Plain values; `scenarios/base.py` draws them from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NEVER = float("inf")


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
    coming_bytes: int = 32 << 20  # of rows that one peer may have to send to a server on bulk
    gateways: int = 1
    input_tokens: int = 8192  # most entries per Input message ...
    short_input: int = 256  # ... and up to how many go on the live lane
    grant_seconds: float = NEVER
    lease_seconds: float = NEVER
    replay_bytes: int = 1 << 20  # for kept rows, at each server
    late: float = 0.0  # when servers are heard of whose blocks others have too


@dataclass(frozen=True, slots=True)
class Weather:
    """How messages travel and steps run; seconds."""

    latency: float = 0.0005  # mean, exponential
    bulk_factor: float = 1.0  # how much slower the bulk lane is
    spike_chance: float = 0.0  # of one message being late by `spike`
    spike: float = 0.2
    duplicate_chance: float = 0.0
    duplicate_delay: float = 0.01
    step: float = 0.001
    row: float = 0.0  # of a step, for each of its rows
    slow_step_chance: float = 0.0
    slow_step: float = 0.5
    failed_step_chance: float = 0.0
    evict_chance: float = 0.0  # of kept rows going right after a Fenced that told of them
    notice: float = 0.003  # mean time until a side hears that a link broke
    lane_bytes: float = NEVER  # of rows that may be on their way on a lane: a real one ends then
    late_notice_chance: float = 0.2  # ... of one side hearing it `late_notice` later
    late_notice: float = 0.3


@dataclass(frozen=True, slots=True)
class Faults:
    """When trouble strikes, and of which kind (relative weights)."""

    until: float = 0.0  # none after this
    most: int = 1_000_000  # this many at most
    gap: float = 0.05  # mean seconds between faults
    burst_chance: float = 0.3  # of another one right after a fault: inside the loop
    burst_gap: float = 0.002
    weights: dict[str, float] = field(default_factory=dict)  # by name, see faults.py
    restart: float = 0.05  # mean seconds until a killed server is back
    never_back_chance: float = 0.0  # of a killed server with a living twin staying dead
    reshape_chance: float = 0.0  # of a killed server coming back with other blocks
    lasting_chance: float = 0.0  # of a parted pair keeping its links, on which one hears nothing


@dataclass(frozen=True, slots=True)
class Load:
    sessions: int = 5
    spread: float = 0.3  # sessions start within this many seconds
    turns: int = 2
    prompt: tuple[int, int] = (1, 12)
    max_tokens: tuple[int, int] = (1, 16)
    to_the_end_chance: float = 0.03  # of max_tokens None
    think: float = 0.02
    rewind_chance: float = 0.2
    stop_chance: float = 0.1
    close_chance: float = 0.1
    quit_chance: float = 0.1  # of closing when refused
    eos_chance: float = 0.2
    sampled_chance: float = 0.5
    slow_reader_chance: float = 0.1
    read_pause: float = 0.01
    poisoned: int = 0  # of the clients, the first so many: a model that reads what they say fails
    poison_chance: float = 0.0  # ... in a step

    def poisons(self, session: str) -> bool:
        return int(session[1:]) < self.poisoned


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    name: str
    layout: Layout
    weather: Weather
    faults: Faults
    load: Load
    fenced_seconds: float = NEVER  # the gateway core's patience with a silent hop
    answer_seconds: float = 0.3  # ... when there is a way around it
    silent_seconds: float = 0.3  # ... and with a server on a live route that says nothing
    overdue_seconds: float = 1.0  # ... and with a token that does not come
    copy_tries: int = 3  # ... and with failing copies; 0: it moves sessions without
    rebalance_seconds: float = 60.0  # ... and with servers that have more sessions than equals
    adopts: bool = False  # clients of a dead gateway go on at another one (R20)
    hold_seconds: float = NEVER  # ... and with a lack of servers or room; then a session may break
    patience: float = 12.0  # a session without progress for so long after the last fault is stuck
    vocab: int = 4093

    @property
    def planned(self) -> bool:
        """Whether servers are only left as planned: no session may see a fault."""
        return set(self.faults.weights) == {"order"}

    @property
    def silent_faults(self) -> bool:
        """Whether there are troubles that nobody is told of: only a deadline ends what they hold up."""
        quiet = {"freeze", "stop", "stop_gateway", "wedge", "hush", "partition", "cut_off", "mute"}
        weather = self.weather
        return bool(
            quiet & set(self.faults.weights) or weather.slow_step_chance or weather.spike_chance
        )
