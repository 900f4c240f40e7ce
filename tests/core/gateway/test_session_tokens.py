"""A Token message is appended once, in order, and only from the tail of the running epoch (I2, I3; R4, freeze)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from support.core.scripted_server import Script

from modelswarm.protocol.identity import NO_HANDLE, Epoch, Handle, PeerId
from modelswarm.protocol.messages import FaultKind, Finish, Token
from modelswarm_gateway.core.interface.effects import Emitted, Rerouted

SESSION = "s"
PROMPT = (5, 6, 7)
FIRST = 20  # the tail's first token, received before each test's own tokens
END = len(PROMPT) + 1
HEAD, TAIL, SPARE = "a/1/0", "b/1/0", "c/1/0"
NEW = 30


@dataclass
class Running:
    """A session over HEAD and TAIL whose log has END entries. SPARE has no hop of it."""

    script: Script
    epoch: Epoch
    handles: dict[PeerId, Handle]

    def receive(
        self,
        offset: int,
        *,
        sender: PeerId = TAIL,
        hop: PeerId = TAIL,
        counter: int = 0,
        gateway: int = 0,
        token: int = NEW,
        finish: Finish = Finish.NONE,
    ) -> None:
        """Receive a token for position END + offset, from `sender`, with the handle of the hop at `hop`.

        `counter` and `gateway` are added to the epoch in which the session ran first.
        """
        epoch = Epoch(self.epoch.counter + counter, self.epoch.gateway + gateway)
        handle = self.handles.get(hop, NO_HANDLE)
        self.script.send(sender, Token(handle, epoch, END + offset, token, finish=finish))

    @property
    def log(self) -> list[int]:
        turn = self.script.core.parked_turn(SESSION)
        assert turn is not None
        return list(turn.tokens)

    @property
    def emitted(self) -> list[tuple[int, int]]:
        """Positions and tokens that the client received since `start_session`."""
        return [(e.position, e.token) for e in self.script.gateway.all(Emitted)]

    @property
    def faults(self) -> list[tuple[str, PeerId]]:
        return [(e.cause, e.peer) for e in self.script.gateway.all(Rerouted)]


def start_session(state: str = "running") -> Running:
    """Start a session and bring it into `state`; all states but "running" raise the epoch by one."""
    script = Script()
    for name, first, last in (("a", 0, 2), ("b", 2, 4)):
        script.add_server(name, first, last)
    script.start_turn(SESSION, PROMPT)
    script.token(SESSION, FIRST)
    script.add_server("c", 2, 4)
    handles = {peer: script.hop(peer).reply for peer in (HEAD, TAIL)}
    running = Running(script, script.gateway.view(SESSION).epoch, handles)
    if state == "fencing":
        for peer in (HEAD, TAIL):
            script.server(peer).silent = True
        script.reports(SESSION, TAIL, FaultKind.GAP)
    elif state == "held":
        script.kill(HEAD)
    elif state == "parked":
        script.core.cancel_turn(SESSION, script.now)
        script.run()
    view = script.gateway.view(SESSION)
    assert (view.state, view.length) == (state, END)
    script.record.clear()
    script.effects.clear()
    return running


@dataclass(frozen=True)
class Stale:
    """A token that must change nothing."""

    offset: int = 0
    counter: int = 0
    gateway: int = 0
    sender: PeerId = TAIL
    hop: PeerId = TAIL
    state: str = "running"


STALE = {
    "one_below_end": Stale(-1),
    "first_of_prompt": Stale(-END),
    "negative_position": Stale(-END - 1),
    "older_epoch": Stale(counter=-1),
    "older_epoch_below_end": Stale(-1, counter=-1),
    "older_epoch_beyond_end": Stale(3, counter=-1),
    "newer_epoch": Stale(counter=1),
    "newer_epoch_beyond_end": Stale(3, counter=1),
    "epoch_of_lower_gateway": Stale(gateway=-1),
    "epoch_of_higher_gateway": Stale(gateway=1),
    "head_by_its_handle": Stale(sender=HEAD, hop=HEAD),
    "head_by_its_handle_beyond_end": Stale(3, sender=HEAD, hop=HEAD),
    "head_by_handle_of_tail": Stale(sender=HEAD),
    "head_by_handle_of_tail_beyond_end": Stale(3, sender=HEAD),
    "tail_by_handle_of_head": Stale(hop=HEAD),
    "server_off_route": Stale(sender=SPARE),
    "server_off_route_beyond_end": Stale(3, sender=SPARE),
    "unknown_handle": Stale(hop=SPARE),
    "fencing": Stale(counter=1, state="fencing"),
    "fencing_beyond_end": Stale(3, counter=1, state="fencing"),
    "fencing_older_epoch": Stale(state="fencing"),
    "fencing_older_epoch_beyond_end": Stale(3, state="fencing"),
    "held": Stale(counter=1, state="held"),
    "held_older_epoch": Stale(state="held"),
    "parked": Stale(counter=1, state="parked"),
    "parked_older_epoch": Stale(state="parked"),
}


@pytest.mark.parametrize("stale", STALE.values(), ids=STALE)
def test_stale_token_changes_nothing(stale: Stale) -> None:
    running = start_session(stale.state)
    epoch = running.script.gateway.view(SESSION).epoch
    running.receive(
        stale.offset,
        sender=stale.sender,
        hop=stale.hop,
        counter=stale.counter,
        gateway=stale.gateway,
    )
    assert running.log == [*PROMPT, FIRST]
    assert running.script.effects == []
    assert running.script.record == []
    assert running.script.gateway.view(SESSION).epoch == epoch


def test_token_at_log_end_is_appended() -> None:
    running = start_session()
    running.receive(0)
    assert running.log == [*PROMPT, FIRST, NEW]
    assert running.emitted == [(END, NEW)]
    assert running.faults == []


def test_repeated_token_is_appended_once() -> None:
    running = start_session()
    for offset, token in ((0, 30), (0, 30), (0, 31), (1, 32), (0, 33), (1, 34), (2, 35)):
        running.receive(offset, token=token)
    assert running.log == [*PROMPT, FIRST, 30, 32, 35]
    assert running.emitted == [(END, 30), (END + 1, 32), (END + 2, 35)]
    assert running.faults == []


@pytest.mark.parametrize("offset", [1, 2, 1000])
def test_token_beyond_log_end_is_a_gap(offset: int) -> None:
    running = start_session()
    running.receive(offset)
    assert running.log == [*PROMPT, FIRST]
    assert running.emitted == []
    assert running.faults == [("gap", TAIL)]
    assert running.script.gateway.view(SESSION).epoch.counter == running.epoch.counter + 1


def test_token_after_gap_needs_the_new_epoch() -> None:
    """The missing token arrives late; the new epoch samples it again."""
    running = start_session()
    running.receive(1, token=31)
    running.receive(0, token=30)
    assert running.emitted == []
    running.receive(0, token=30, counter=1)
    running.receive(1, token=31, counter=1)
    assert running.emitted == [(END, 30), (END + 1, 31)]
    assert running.log == [*PROMPT, FIRST, 30, 31]


def test_token_after_the_finishing_one_is_ignored() -> None:
    running = start_session()
    running.receive(0, token=30, finish=Finish.STOP)
    running.receive(1, token=31)
    running.receive(5, token=35)
    assert running.emitted == [(END, 30)]
    assert running.log == [*PROMPT, FIRST, 30]
    assert running.faults == []
