"""What hops are told: Fence, Go, Copy, the log's entries, credit.

Used by the loop (`recovery.py`), by planned moves (`moves.py`) and by `gateway.py`, which say what is to be true; here
it is put into messages. Of a session nothing changes but what has been told: the credit, and a hop that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelswarm.protocol.identity import NO_HANDLE
from modelswarm.protocol.messages import (
    CopyKv,
    Create,
    Fence,
    Input,
    Lane,
    Message,
    Neighbour,
    Send,
    StartEpoch,
    Window,
)
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.sessions.replay_plan import Restart
from modelswarm_gateway.core.sessions.session import Hop, Session, State

MOST_UNTIL_REST = 8  # tokens: nobody is given more credit than that to rest together with others


class Orders:
    def __init__(self, settings: GatewaySettings, emit: Callable[[Effect], None]) -> None:
        self._settings = settings
        self._emit = emit

    def fence(self, session: Session, hop: Hop, *, turn: bool = True, repair: bool = False) -> None:
        """Opens the hop if its server has not told its name. `turn` False: it is to rest, and needs no turn."""
        create = None
        if hop.own == NO_HANDLE:
            repair = repair or (session.admitted and session.mending)
            create = Create(session.name, hop.first, hop.last, for_recovery=repair)
            hop.asked = session.epoch
        stale = turn and (create is not None or hop.turn != session.turn_number)
        kv = min(hop.kv_limit, session.length - 1)
        log = min(hop.log_limit, session.length)
        self._send(
            hop,
            Fence(
                handle=hop.own,
                gateway_handle=hop.reply,
                epoch=session.epoch,
                kv_cut=kv,
                log_cut=log,
                create=create,
                turn=session.turn if stale else None,
                last_started=session.ran,
            ),
        )

    def go(self, session: Session, index: int, point: Restart) -> None:
        """The hop at that place of the route runs."""
        hops = session.hops
        hop, tail = hops[index], index == len(hops) - 1
        self._go(
            session,
            hop,
            point,
            hops[index - 1] if index else None,
            successor=None if tail else _neighbour(hops[index + 1]),
            ring=_neighbour(hops[0]) if tail and len(hops) > 1 else None,
            credit=session.credit if tail else 0,
        )

    def copy(self, session: Session, old: Hop, hop: Hop) -> None:
        """A hop beside the route goes, warm, and the old one is told to send it its KV (R13)."""
        self._go(
            session,
            hop,
            Restart(hop.kv, max(hop.kv, session.turn.reserved_positions)),
            old,
            warm=True,
        )
        to = _neighbour(hop)
        self._send(old, CopyKv(old.own, session.epoch, to, hop.kv, hop.first, hop.last))

    def end_copies(self, session: Session, old: Hop) -> None:
        self._send(old, CopyKv(old.own, session.epoch, None))

    def _go(
        self,
        session: Session,
        hop: Hop,
        point: Restart,
        predecessor: Hop | None,
        *,
        successor: Neighbour | None = None,
        ring: Neighbour | None = None,
        credit: int = 0,
        warm: bool = False,
    ) -> None:
        self._send(
            hop,
            StartEpoch(
                handle=hop.own,
                epoch=session.epoch,
                length=session.length,
                start=point.start,
                send_from=point.send_from,
                predecessor=None if predecessor is None else _neighbour(predecessor),
                successor=successor,
                ring=ring,
                credit=credit,
                hops=len(session.hops),
                sample=not session.read_only,
                standby=warm,
            ),
        )

    def log(self, session: Session, hop: Hop, start: int, *, warm: bool = False) -> None:
        """The log's entries from `start` on, for a head or a tail. A warm one is sent more later: all on one lane, or
        the short ones would overtake the first."""
        short = session.length - start <= self._settings.short_input and not warm
        lane = Lane.LIVE if short else Lane.BULK
        most = self._settings.input_tokens
        for first in range(start, session.length, most):
            tokens = tuple(session.log[first : first + most])
            self._send(hop, Input(hop.own, session.epoch, first, tokens), lane)

    def credit(self, session: Session) -> None:
        """Tell the tail how far the reader is, when it is worth a message (R7)."""
        if session.state is not State.RUNNING or session.read_only or session.credit_cap == 0:
            return
        credit = session.wanted_credit()
        if credit - session.credit >= session.credit_step:
            self._grant(session, credit)

    def quiesce(self, sessions: Sequence[Session]) -> None:
        """They come to rest, each after as many tokens as the others if its reader lets it (R7): what shares steps goes
        on sharing them, and is not divided among many small ones."""
        left = [session.credit + 1 - session.length for session in sessions]
        last = max((tokens for tokens in left if tokens <= MOST_UNTIL_REST), default=0)
        for session, tokens in zip(sessions, left, strict=True):
            session.credit_cap = 0
            credit = min(session.length - 1 + last, session.read + session.credit_ahead)
            if tokens > 0 and credit > session.credit and not session.read_only:
                self._grant(session, credit)

    def _grant(self, session: Session, credit: int) -> None:
        session.credit = credit
        tail = session.hops[-1]
        self._send(tail, Window(tail.own, session.epoch, received=0, limit=credit))

    def _send(self, hop: Hop, message: Message, lane: Lane = Lane.LIVE) -> None:
        self._emit(Send(hop.server, lane, message))


def _neighbour(hop: Hop) -> Neighbour:
    return Neighbour(hop.server, hop.own)
