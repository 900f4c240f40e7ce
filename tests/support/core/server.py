"""A real server core on the hash model, as an actor of the in-memory network; and the reference tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, Unpack

from support.core.actor import Actor
from typing_extensions import override

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Item,
    Lane,
    Role,
    Sampling,
    Send,
)
from modelswarm_serving.core.server import GrammarRequest, ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import BatchItem, ModelShape, Result, Task
from modelswarm_serving.model.hash_model import (
    MASK,
    HashModel,
    embed,
    key_value,
    output,
    reference_tokens,
)

MODEL = "m"
VOCABULARY = 97


class Options(TypedDict, total=False):
    """Fields of a server that a test may set, named as in its settings, its shape and its Hello."""

    n_blocks: int
    row_bytes: int
    page_size: int
    total_pages: int
    max_length: int
    revision: str
    dtype: str
    lease_seconds: float
    token_budget: int
    pipeline_rows: int
    row_window: int
    in_flight_bytes: int
    replay_bytes: int
    transfer_rate: int
    fork_step_bytes: int
    windows: tuple[int | None, ...]


@dataclass(eq=False)
class Server(Actor):
    core: ServerCore
    model: HashModel
    out: tuple[Task, ...] = ()  # tasks of the running step
    step_seconds: float = 0.0  # duration of each step
    step_ends: float = 0.0
    broken: bool = False  # every step fails
    lazy: bool = False  # makes no steps
    stuck: bool = False  # no step ends
    holds_grammars: bool = False  # compiles none until `compile_grammars`
    grammar_requests: list[GrammarRequest] = field(default_factory=list)  # not compiled yet

    @property
    def address(self) -> Address:
        return Address(self.peer, self.hello.target)

    @property
    def works(self) -> tuple[BatchItem, ...]:
        """Return the rows of the running step, without transfers."""
        return tuple(task for task in self.out if isinstance(task, BatchItem))

    @override
    def connect(self, hello: Hello, now: float) -> None:
        lease = hello.lease_ms / 1000
        self.core.on_peer_connected(
            hello.peer, hello.role, now, hello.target, lease, hello.replaces
        )

    @override
    def disconnect(self, peer: PeerId, now: float) -> None:
        self.core.on_peer_lost(peer, now)

    @override
    def receive(self, sender: PeerId, item: Item, now: float) -> None:
        self.core.receive(sender, item, now)
        self.grammar_requests += self.core.take_grammar_requests()
        if not self.holds_grammars:
            self.compile_grammars(now)

    def compile_grammars(self, now: float, fault: str | None = None) -> None:
        requests, self.grammar_requests = self.grammar_requests, []
        for request in requests:
            self.core.on_grammar_ready(request, fault, now)

    @override
    def take_sends(self) -> list[Send]:
        return self.core.take_sends()

    @override
    def tick(self, now: float) -> None:
        self.core.tick(now)

    @override
    def heartbeat(self) -> Heartbeat:
        return self.core.heartbeat()

    @override
    def step(self, now: float) -> bool:
        if self.lazy:
            return False
        if not self.out:
            return self.begin_step(now)
        if self.stuck or now < self.step_ends - 1e-9:
            return False
        failed = [Result(error="CUDA error: device-side assert triggered")] * len(self.out)
        self.end_step(now, failed if self.broken else None)
        return True

    def begin_step(self, now: float) -> bool:
        """Begin a step if none runs. Return False if there is no work."""
        if not self.out:
            self.out = self.core.plan_step(now)
            self.step_ends = now + self.step_seconds
        return bool(self.out)

    def end_step(self, now: float, results: list[Result] | None = None) -> None:
        work, self.out = self.out, ()
        self.core.finish_step(self.model.step(work) if results is None else results, now)


def make_server(
    name: str,
    first: int,
    last: int,
    hello: Mapping[str, object] | None = None,
    **options: Unpack[Options],
) -> Server:
    """Return a server of the blocks [first, last). `hello` replaces fields of its Hello, even by false values."""
    shape = ModelShape(
        first,
        last,
        n_blocks=options.get("n_blocks", 4),
        row_bytes=options.get("row_bytes", 8),
        page_size=options.get("page_size", 4),
        total_pages=options.get("total_pages", 256),
        max_length=options.get("max_length", 4096),
        vocab_size=VOCABULARY,
        hidden_bytes=options.get("row_bytes", 8),
        windows=options.get("windows", ()),
    )
    peer = f"{name}/1/b"
    address = Address(peer, f"{name}:1")
    settings = ServerSettings(
        address,
        lease_seconds=options.get("lease_seconds", 30.0),
        token_budget=options.get("token_budget", 512),
        pipeline_rows=options.get("pipeline_rows", 256),
        row_window=options.get("row_window", 1024),
        in_flight_bytes=options.get("in_flight_bytes", 32 << 20),
        replay_bytes=options.get("replay_bytes", 1 << 20),
        transfer_rate=options.get("transfer_rate", 0),
        fork_step_bytes=options.get("fork_step_bytes", 1 << 20),
    )
    draws = random.Random(peer)
    core = ServerCore(settings, shape, lambda: draws.getrandbits(64))
    own = Hello(
        PROTOCOL_VERSION,
        peer,
        Role.SERVER,
        "",
        Lane.LIVE,
        target=address.target,
        model=MODEL,
        revision=options.get("revision", "r1"),
        first=first,
        last=last,
        n_blocks=shape.n_blocks,
        dtype=options.get("dtype", "float32"),
        row_bytes=shape.row_bytes,
        max_length=core.max_session_length,
        total_pages=shape.total_pages,
        page_size=shape.page_size,
        hidden_bytes=shape.hidden_bytes if shape.is_tail else 0,
    )
    return Server(replace(own, **(hello or {})), core, HashModel(shape))  # type: ignore[arg-type]


def expected_rows(log: Sequence[int], first: int, n_blocks: int = 4) -> list[tuple[int, int]]:
    """Return the positions and the last hidden states of the log's entries from `first` on."""
    return list(enumerate(reference_rows(log, {}, n_blocks)))[first:]


def reference_rows(
    log: Sequence[int],
    opaque: Mapping[int, int],
    n_blocks: int = 4,
    first: int = 0,
    prompts: Mapping[int, Sequence[int]] | None = None,
) -> list[int]:
    """Return the rows of the log's entries behind blocks [first, n_blocks).

    `opaque`: rows before them, by position. `prompts`: what each block adds to them.
    """
    sums = [0] * n_blocks
    found = []
    for position, token in enumerate(log):
        row = opaque[position] if position in opaque else embed(token)
        added = (prompts or {}).get(position, [0] * n_blocks)
        for block in range(first, n_blocks):
            row = (row + added[block]) & MASK
            stored = key_value(block, position, row)
            row, sums[block] = output(stored, sums[block]), (sums[block] + stored) & MASK
        found.append(row)
    return found


def expected(
    prompt: Sequence[int], new: int, n_blocks: int = 4, sampling: Sampling | None = None
) -> list[int]:
    """Return the tokens of any correct route."""
    return reference_tokens(
        prompt,
        sampling or Sampling(),
        new,
        len(prompt) + new,
        n_blocks=n_blocks,
        vocabulary=VOCABULARY,
    )
