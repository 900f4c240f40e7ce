"""Compares real server cores with the ownership model, one event at a time.

`MirroredServer` is a server of the in-memory network. Around each event it translates the core's state into the model,
lets the model make the same transition, and asserts that state and answers agree. Events that the model leaves out
(steps, deadlines, copies) may change only what `_expect_same_owner` allows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Unpack

from support.core.network import Network
from support.core.server import Options, Server, make_server
from support.ownership_model import server as model
from support.ownership_model.state import (
    ACK,
    CLOSE,
    FENCE,
    FIND,
    GRANTED,
    INFO,
    INPUT,
    NO_EPOCH,
    NO_GATEWAY,
    OWNED,
    REPORT,
    STALE_EPOCH,
    START,
    UNKNOWN,
    Epoch,
    Handle,
    Hop,
    Message,
    Rules,
)
from support.ownership_model.state import Server as ModelServer
from typing_extensions import override

from modelswarm.protocol.identity import Epoch as RealEpoch
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import (
    Close,
    FaultReport,
    Fence,
    FenceAck,
    FindSession,
    Hello,
    Input,
    Item,
    OwnedSessions,
    Refusal,
    Role,
    Send,
    SessionInfo,
    StartEpoch,
)
from modelswarm_serving.core.hops.hop import Hop as RealHop


@dataclass(eq=False)
class MirroredServer(Server):
    """A server whose every event is compared with the model. `seen`: how often each kind of outcome was compared."""

    gateways: list[PeerId] = field(default_factory=list)  # their places are their numbers
    session: str = ""
    rules: Rules = field(default_factory=Rules)
    seen: Counter[str] = field(default_factory=Counter)
    taken: list[Send] = field(default_factory=list)  # read for a comparison, not sent yet

    @property
    def compared(self) -> int:
        return sum(self.seen.values()) - self.seen["skipped"]

    @override
    def connect(self, hello: Hello, now: float) -> None:
        if hello.role is not Role.GATEWAY:
            super().connect(hello, now)
            return
        if hello.peer not in self.gateways:
            self.gateways.append(hello.peer)
        before = self.abstract(now)
        super().connect(hello, now)
        expected = model.connect(before, self.gateways.index(hello.peer))
        self._compare("connect", expected.hop, before, now)

    @override
    def disconnect(self, peer: PeerId, now: float) -> None:
        before = self.abstract(now)
        super().disconnect(peer, now)
        if peer in self.gateways:
            expected = model.disconnect(before, self.gateways.index(peer))
            self._compare("disconnect", expected.hop, before, now)

    @override
    def receive(self, sender: PeerId, item: Item, now: float) -> None:
        if sender not in self.gateways:
            super().receive(sender, item, now)
            return
        before, is_borrowed = self.abstract(now), self._is_borrowed()
        message = self._translate(sender, item)
        self.taken += self.core.take_sends()
        super().receive(sender, item, now)
        new = self.core.take_sends()
        self.taken += new
        if is_borrowed or self.core._peers.has_ended(sender):
            self.seen["skipped"] += 1
            return
        peer = self.gateways.index(sender)
        answers: model.Answers = ()
        if message is None:
            expected = model.end_lapse(before, peer)
        else:
            expected, answers = model.receive(before, peer, message, self.rules)
        self._compare(_outcome(message, before, expected, answers), expected.hop, before, now)
        if message is not None:
            self._compare_answers(answers if self._is_known(sender, item) else (), new)

    @override
    def take_sends(self) -> list[Send]:
        sends, self.taken = [*self.taken, *self.core.take_sends()], []
        return sends

    @override
    def step(self, now: float) -> bool:
        before, had_fence = self.abstract(now), self._has_pending_fence()
        moved = super().step(now)
        if not had_fence:
            self._expect_same_owner(before, now, may_be_freed=False)
        return moved

    @override
    def tick(self, now: float) -> None:
        before = self.abstract(now)
        super().tick(now)
        self._expect_same_owner(before, now, may_be_freed=True)

    # ---- the core's state in terms of the model

    def abstract(self, now: float) -> ModelServer:
        self.core._advance_clock(now)
        peers, hop = self.core._peers, self._hop()
        lapsed = (peers.silent_seconds(g, now) >= peers.lease_seconds(g) for g in self.gateways)
        return ModelServer(
            linked=tuple(map(peers.is_linked, self.gateways)),
            lapsed=tuple(lapsed),
            hop=None if hop is None else self._abstract_hop(hop),
        )

    def _hop(self) -> RealHop | None:
        hops = [hop for hop in self.core._fencing.hops if hop.session == self.session]
        assert len(hops) <= 1, "the model has one range of blocks"
        return hops[0] if hops else None

    def _abstract_hop(self, hop: RealHop) -> Hop:
        started = hop.started or hop.counters
        return Hop(
            owner=self.gateways.index(hop.gateway) if hop.gateway else NO_GATEWAY,
            handle=_handle(hop.handle) if hop.gateway else None,
            epoch=_epoch(hop.epoch),
            run=_epoch(hop.newest_run_epoch),
            was_started=hop.was_started,
            started_by_owner=hop.started_by_owner,
            phase=hop.phase.value,
            log=tuple(hop.log),
            ran_log=hop.ran_log,
            counters=_epoch(None if started is None else started.epoch),
            length=0 if hop.started is None else hop.started.length,
        )

    def _is_borrowed(self) -> bool:
        """True while a step has the hop, as its truncation waits for the step's end; or a part of a log has run."""
        hop = self._hop()
        if hop is None:
            return False
        has_run_part = hop.is_head and hop.kv > hop.ran_log
        return hop.in_step or hop.pending_fence is not None or has_run_part

    def _has_pending_fence(self) -> bool:
        hop = self._hop()
        return hop is not None and hop.pending_fence is not None

    def _translate(self, sender: PeerId, item: Item) -> Message | None:
        """Return the model's message; None for one that it does not have."""
        match item:
            case Fence():
                handle = None if item.create is not None else _handle(item.handle)
                run = _epoch(item.last_started)
                return Message(FENCE, _epoch(item.epoch), handle, run, item.log_cut)
            case StartEpoch():
                assert not item.standby, "the model has no copies"
                return Message(START, _epoch(item.epoch), _handle(item.handle), length=item.length)
            case Input():
                return Message(
                    INPUT,
                    _epoch(item.epoch),
                    _handle(item.handle),
                    length=item.start,
                    log=item.tokens,
                )
            case Close():
                return Message(CLOSE, handle=_handle(item.handle), flag=item.relinquished)
            case OwnedSessions() if sender not in self.core._reconciled:
                return Message(OWNED, handles=tuple(_handle(o.handle) for o in item.sessions))
            case FindSession():
                return Message(FIND)
        return None

    def _is_known(self, sender: PeerId, item: Item) -> bool:
        """False for a StartEpoch by a handle that its sender has never had: it is not answered."""
        if not isinstance(item, StartEpoch):
            return True
        former = self.core._fencing.hops.former_owner(item.handle)
        return former is not None and former.gateway == sender

    # ---- comparisons

    def _compare(self, kind: str, expected: Hop | None, before: ModelServer, now: float) -> None:
        """The hop is as the model says. Of handles only their renewal is compared."""
        after = self.abstract(now).hop
        self.seen[kind] += 1
        is_new = _is_renewed(before.hop, after)
        assert is_new == _is_renewed(before.hop, expected), (kind, before, expected, after)
        assert _comparable(after) == _comparable(expected), (kind, before, expected, after)

    def _compare_answers(self, answers: model.Answers, sends: list[Send]) -> None:
        got = [self._abstract_answer(send) for send in sends]
        told = [(g, answer._replace(handle=None)) for g, answer in answers]
        found = [each for each in got if each is not None]
        assert found == told, (found, told)

    def _abstract_answer(self, send: Send) -> tuple[int, Message] | None:
        item = send.item
        if send.to.peer not in self.gateways:
            return None
        gateway = self.gateways.index(send.to.peer)
        match item:
            case FenceAck():
                return gateway, _abstract_ack(item)
            case FaultReport():
                return gateway, Message(REPORT, _epoch(item.epoch))
            case SessionInfo():
                owner = self.gateways.index(item.owner) if item.owner else NO_GATEWAY
                logs = [hop.log for hop in item.hops]
                epoch, run = _epoch(item.epoch), _epoch(item.last_started)
                length, has_hop = max(logs, default=0), bool(item.hops)
                return gateway, Message(
                    INFO, epoch, run=run, length=length, owner=owner, flag=has_hop
                )
        return None

    def _expect_same_owner(self, before: ModelServer, now: float, *, may_be_freed: bool) -> None:
        """A step or a deadline frees the hop, or changes neither owner nor epochs, nor shortens the log."""
        after = self.abstract(now).hop
        was = before.hop
        if was is None or (after is None and may_be_freed):
            assert after is None
            return
        assert after is not None
        assert after[: Hop._fields.index("phase")] == was[: Hop._fields.index("phase")]
        assert after.log[: len(was.log)] == was.log
        self.seen["step or deadline"] += 1


def serve_mirrored(
    network: Network, session: str, name: str, first: int, last: int, **options: Unpack[Options]
) -> MirroredServer:
    """Attach a new mirrored server of the blocks [first, last)."""
    chosen: Options = {**network.options, **options}
    plain = make_server(name, first, last, **chosen)
    return network.join(MirroredServer(plain.hello, plain.core, plain.model, session=session))


def _outcome(
    message: Message | None, before: ModelServer, after: ModelServer, answers: model.Answers
) -> str:
    """Name what has happened, so that a test can see that everything has."""
    if message is None:
        return "other"
    if message.kind == CLOSE and before.hop != after.hop:
        return "close: relinquished" if after.hop is not None else "close: freed"
    if message.kind != FENCE or not answers:
        return message.kind
    answer = answers[-1][1].answer
    if answer != GRANTED or before.hop is None or after.hop is None:
        return f"fence: {answer}"
    if before.hop.owner == after.hop.owner:
        return "fence: owner"
    return "fence: replaced" if after.hop.counters == NO_EPOCH else "fence: taken over"


def _abstract_ack(ack: FenceAck) -> Message:
    epoch = _epoch(ack.epoch)
    if ack.unknown:
        return Message(ACK, epoch, answer=UNKNOWN)
    if ack.refusal is not None:
        assert ack.refusal is Refusal.STALE_EPOCH, "the model has no other refusals"
        rank = _epoch(ack.owner_last_started), _epoch(ack.owner_epoch)
        return Message(ACK, epoch, answer=STALE_EPOCH, rank=rank)
    run = _epoch(None if ack.counters is None else ack.counters.epoch)
    return Message(ACK, epoch, run=run, length=ack.log, answer=GRANTED)


def _comparable(hop: Hop | None) -> Hop | None:
    return None if hop is None else hop._replace(handle=None, length=0)


def _is_renewed(before: Hop | None, after: Hop | None) -> bool:
    return after is not None and (before is None or before.handle != after.handle)


def _epoch(epoch: RealEpoch | None) -> Epoch:
    return NO_EPOCH if epoch is None else (epoch.counter, epoch.gateway)


def _handle(handle: int) -> Handle:
    return handle, 0
