"""Two gateways own hops of one session: exactly one of them relinquishes it (R20, takeover).

The first tests play the servers of one gateway. The last ones run two gateways on real server cores.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from support.core.gateway import LEASE, Gateway, add_gateway, takeover_network
from support.core.network import Network
from support.core.scripted_server import Script
from support.core.server import MODEL, expected

from modelswarm.protocol.identity import NO_HANDLE, Epoch, PeerId
from modelswarm.protocol.messages import Close, FaultKind, Fence, FenceAck, Lane, Refusal
from modelswarm_gateway.core.interface.effects import OwnershipLost
from modelswarm_gateway.core.interface.settings import GatewaySettings

SESSION = "named"
HEAD, TAIL = "a/1/0", "b/1/0"
TICK = 0.0625  # seconds; its multiples are exact, so that a deadline can be met exactly
CONTEST = 0.5  # seconds
PROMPT = [random.Random(at).randrange(97) for at in range(12)]
NEW = 40
WHOLE = [*PROMPT, *expected(PROMPT, NEW)]


@dataclass
class Contender:
    """A gateway whose session needs HEAD and TAIL; another gateway owns the hop at TAIL."""

    script: Script

    def set_silent(self, silent: bool) -> None:
        for peer in (HEAD, TAIL):
            self.script.server(peer).silent = silent

    def refuse(self, *owner: int, at: PeerId = TAIL, ran: bool = False) -> None:
        """Refuse the last Fence there. `owner`: the other epoch's distance from ours; empty: unknown.

        `ran`: the other gateway has run that epoch, while this one has run none.
        """
        mine = self.script.gateway.view(SESSION).epoch
        other = Epoch(mine.counter + owner[0], mine.gateway + owner[1]) if owner else None
        fence = self.script.sent_to(at, Fence)[-1]
        refusal = Refusal.STALE_EPOCH
        self.script.send(
            at,
            FenceAck(
                fence.gateway_handle,
                NO_HANDLE,
                fence.epoch,
                refusal=refusal,
                owner_epoch=other,
                owner_last_started=other if ran else None,
            ),
        )

    def contend_until(self, seconds: float) -> None:
        """Answer all Fences until then: HEAD grants its hop, TAIL belongs to a lower epoch."""
        while self.script.now < seconds:
            fences = len(self.script.sent_to(TAIL, Fence))
            self.script.wait(TICK, TICK)
            if len(self.script.sent_to(TAIL, Fence)) > fences:
                self.script.grant(HEAD)
                self.refuse(-1, 0)

    @property
    def state(self) -> str:
        view = self.script.core.find_view(SESSION)
        return "relinquished" if view is None else view.state

    @property
    def losses(self) -> int:
        return len(self.script.gateway.all(OwnershipLost))

    @property
    def closes(self) -> int:
        """Hops closed at HEAD."""
        return len(self.script.sent_to(HEAD, Close))


def start_contender(*, owns_head: bool = True) -> Contender:
    """Begin a turn at time 0. HEAD grants its hop if `owns_head`; TAIL has not answered."""
    settings = GatewaySettings(
        contest_seconds=CONTEST, retry_seconds=TICK, retry_limit_seconds=TICK
    )
    script = Script(settings=settings)
    script.add_server("a", 0, 2)
    script.add_server("b", 2, 4)
    contender = Contender(script)
    contender.set_silent(True)
    script.start_turn(SESSION, PROMPT)
    if owns_head:
        script.grant(HEAD)
    return contender


@pytest.mark.parametrize("owner", [(1, 0), (1, -1), (0, 1), ()], ids=str)
def test_lower_epoch_relinquishes_at_once(owner: tuple[int, ...]) -> None:
    contender = start_contender()
    contender.refuse(*owner)
    assert (contender.state, contender.losses) == ("relinquished", 1)
    assert contender.closes == 1


@pytest.mark.parametrize("owner", [(-1, 0), (-1, 1), (0, -1)], ids=str)
def test_higher_epoch_with_a_hop_tries_again(owner: tuple[int, ...]) -> None:
    contender = start_contender()
    contender.refuse(*owner)
    assert (contender.state, contender.losses) == ("held", 0)
    assert contender.closes == 0
    contender.script.wait(2 * TICK, TICK)
    assert contender.state == "fencing"


def test_higher_epoch_with_a_pending_hop_tries_again() -> None:
    """HEAD may still grant the hop that it was asked for."""
    contender = start_contender(owns_head=False)
    contender.refuse(-1, 0)
    assert (contender.state, contender.losses) == ("held", 0)
    contender.set_silent(False)
    contender.script.grant(HEAD)
    contender.script.wait(2 * TICK, TICK)
    assert (contender.state, contender.losses) == ("running", 0)


@pytest.mark.parametrize("order", [(HEAD, TAIL), (TAIL, HEAD)])
def test_higher_epoch_refused_everywhere_contends(order: tuple[PeerId, PeerId]) -> None:
    """It goes on to try: the other gateway, with the lower rank, lets go."""
    contender = start_contender(owns_head=False)
    for peer in order:
        contender.refuse(-1, 0, at=peer)
        assert (contender.state, contender.losses) == ("held", 0)


@pytest.mark.parametrize("ran", [True, False])
def test_epoch_that_ran_outranks_a_higher_one_that_did_not(ran: bool) -> None:
    contender = start_contender()
    contender.refuse(-1, 0, ran=ran)
    assert contender.losses == int(ran)


def test_hop_granted_after_relinquishing_is_freed() -> None:
    contender = start_contender(owns_head=False)
    contender.refuse(1, 0)
    assert (contender.state, contender.losses) == ("relinquished", 1)
    contender.script.grant(HEAD)
    assert contender.closes == 1


def test_contention_ends_exactly_at_its_limit() -> None:
    contender = start_contender()
    contender.refuse(-1, 0)
    contender.contend_until(CONTEST - TICK)
    assert (contender.state, contender.losses, contender.closes) == ("held", 0, 0)
    contender.contend_until(CONTEST)
    assert (contender.state, contender.losses, contender.closes) == ("relinquished", 1, 1)


def test_higher_epoch_runs_once_the_other_one_is_gone() -> None:
    contender = start_contender()
    contender.refuse(-1, 0)
    contender.contend_until(CONTEST - TICK)
    contender.set_silent(False)
    contender.script.wait(2 * TICK, TICK)
    assert (contender.state, contender.losses) == ("running", 0)


def test_token_ends_the_contention() -> None:
    contender = start_contender()
    contender.refuse(-1, 0)
    contender.contend_until(CONTEST - TICK)
    contender.set_silent(False)
    contender.script.wait(2 * TICK, TICK)
    contender.script.token(SESSION)
    contender.set_silent(True)
    contender.script.reports(SESSION, HEAD, FaultKind.GAP)
    contender.script.grant(HEAD)
    contender.refuse(-1, 0)
    assert contender.script.now >= CONTEST
    assert (contender.state, contender.losses) == ("held", 0)


@dataclass
class Split:
    """A named session between two turns: `low` owns the hop at the head, `high` took over the one at the tail."""

    swarm: Network
    low: Gateway
    high: Gateway
    log: list[int]

    def continue_at(self, gateway: Gateway) -> None:
        rest = len(WHOLE) - len(self.log)
        gateway.begin(SESSION, self.log, rest)

    def answer(self, gateway: Gateway) -> list[int]:
        """The log after the turns that ran at `gateway`, with the answer that `low` gave before."""
        tokens = gateway.tokens(SESSION)
        return [*(PROMPT if gateway is self.low else self.log), *tokens]

    @property
    def losers(self) -> list[str]:
        gateways = (self.low, self.high)
        return [g.peer for g in gateways if g.all(OwnershipLost)]

    @property
    def owners(self) -> list[str]:
        servers = self.swarm.servers.values()
        return [hop.gateway for server in servers for hop in server.core._fencing.hops]


def split_session(seed: int | None = None) -> Split:
    """Make the tail miss a lease of heartbeats, and let `high` search while it has no link to the head."""
    swarm = takeover_network(seed)
    head, tail = swarm.serve(0, 2), swarm.serve(2, 4)
    low, high = add_gateway(swarm, 1), add_gateway(swarm, 2)
    swarm.cut_link(high.peer, head.peer)
    low.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    low.core.cancel_turn(SESSION, swarm.now)
    swarm.run()
    swarm.drop(low.peer, tail.peer)
    swarm.wait(LEASE + 0.2)
    swarm.dropped.clear()
    where = high.find(SESSION)
    log = high.fetch(where)
    swarm.link(high.peer, head.peer)
    high.core.take_over(where, MODEL, log, swarm.now)
    swarm.run()
    split = Split(swarm, low, high, list(log.tokens))
    assert split.owners == [low.peer, high.peer]
    assert split.losers == []
    return split


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_of_two_that_continue_only_the_higher_stays(seed: int, delay: float) -> None:
    split = split_session(seed)
    split.continue_at(split.high)
    split.swarm.wait(delay)
    split.continue_at(split.low)
    split.swarm.wait(3.0)
    assert split.losers == [split.low.peer]
    assert split.answer(split.high) == WHOLE
    assert split.owners == [split.high.peer] * 2


@pytest.mark.parametrize("seed", range(5))
def test_against_an_idle_owner_only_the_higher_goes(seed: int) -> None:
    split = split_session(seed)
    split.continue_at(split.high)
    split.swarm.wait(0.3)
    assert split.losers == []
    split.swarm.wait(3.0)
    assert split.losers == [split.high.peer]
    split.continue_at(split.low)
    split.swarm.run()
    assert split.answer(split.low) == WHOLE
    assert split.owners == [split.low.peer] * 2


def test_late_refusal_does_not_end_the_next_session_of_a_name() -> None:
    """Another gateway has the name. The session here is closed before it hears that, and opened again."""
    swarm = takeover_network()
    servers = [swarm.serve(0, 2), swarm.serve(2, 4)]
    first, second = add_gateway(swarm, 1), add_gateway(swarm, 2)
    second.start(SESSION, PROMPT, NEW, ahead=8, above=10)
    swarm.held |= {(server.peer, first.peer, Lane.LIVE) for server in servers}
    first.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    for gateway in (first, second):
        gateway.core.close_session(SESSION, swarm.now)
    swarm.run()
    first.core.open_session(SESSION, MODEL, swarm.now, above=50)
    swarm.held.clear()
    swarm.run()
    assert not first.all(OwnershipLost)
    first.start(SESSION, PROMPT, NEW)
    assert [*PROMPT, *first.tokens(SESSION)] == WHOLE


def test_relinquished_hop_ends_although_others_follow() -> None:
    swarm = takeover_network()
    server = swarm.serve(0, 4)
    gateway = add_gateway(swarm, 1)
    names = [f"{SESSION}{at}" for at in range(12)]
    for name in names:
        gateway.start(name, PROMPT, NEW, ahead=2, above=0)
    for name in names:
        session = gateway.core._sessions[name]
        gateway.core._recovery.relinquish(session, keeps_log=True)
        swarm.wait(LEASE / 4)
    swarm.wait(LEASE / 8)
    left = [hop.session for hop in server.core._fencing.hops]
    assert left == names[-7:], "each is kept for two leases"
