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
from modelswarm_gateway.core.sessions.replay_plan import RestartPoint
from modelswarm_gateway.core.sessions.session import Hop, Session, SessionState

MAX_TOKENS_TO_QUIESCE = (
    8  # tokens: nobody is given more credit than that to rest together with others
)


class HopMessages:
    def __init__(self, settings: GatewaySettings, emit: Callable[[Effect], None]) -> None:
        self._settings = settings
        self._emit = emit

    def send_fence(
        self, session: Session, hop: Hop, *, with_turn: bool = True, for_recovery: bool = False
    ) -> None:
        """Opens the hop if its server has not told its name. `turn` False: it is to rest, and needs no turn."""
        create = None
        if hop.server_handle == NO_HANDLE:
            for_recovery = for_recovery or (session.has_run and session.is_recovering)
            create = Create(session.name, hop.first, hop.last, for_recovery=for_recovery)
            hop.create_epoch = session.epoch
        stale = with_turn and (create is not None or hop.accepted_turn != session.turn_number)
        kv = min(hop.kv_limit, session.length - 1)
        log = min(hop.log_limit, session.length)
        self._send(
            hop,
            Fence(
                handle=hop.server_handle,
                gateway_handle=hop.gateway_handle,
                epoch=session.epoch,
                kv_cut=kv,
                log_cut=log,
                create=create,
                turn=session.turn if stale else None,
                last_started=session.last_started,
            ),
        )

    def start_hop(self, session: Session, index: int, point: RestartPoint) -> None:
        """The hop at that place of the route runs."""
        hops = session.hops
        hop, tail = hops[index], index == len(hops) - 1
        self._send_start(
            session,
            hop,
            point,
            hops[index - 1] if index else None,
            successor=None if tail else _neighbour(hops[index + 1]),
            ring=_neighbour(hops[0]) if tail and len(hops) > 1 else None,
            credit=session.credit if tail else 0,
        )

    def start_copy(self, session: Session, old: Hop, hop: Hop) -> None:
        """A hop beside the route goes, warm, and the old one is told to send it its KV (R13)."""
        self._send_start(
            session,
            hop,
            RestartPoint(hop.kv, max(hop.kv, session.turn.reserved_positions)),
            old,
            standby=True,
        )
        to = _neighbour(hop)
        self._send(old, CopyKv(old.server_handle, session.epoch, to, hop.kv, hop.first, hop.last))

    def stop_copies(self, session: Session, old: Hop) -> None:
        self._send(old, CopyKv(old.server_handle, session.epoch, None))

    def _send_start(
        self,
        session: Session,
        hop: Hop,
        point: RestartPoint,
        predecessor: Hop | None,
        *,
        successor: Neighbour | None = None,
        ring: Neighbour | None = None,
        credit: int = 0,
        standby: bool = False,
    ) -> None:
        self._send(
            hop,
            StartEpoch(
                handle=hop.server_handle,
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
                standby=standby,
            ),
        )

    def send_log(self, session: Session, hop: Hop, start: int, *, standby: bool = False) -> None:
        """The log's entries from `start` on, for a head or a tail. A warm one is sent more later: all on one lane, or
        the short ones would overtake the first."""
        short = session.length - start <= self._settings.max_live_input_tokens and not standby
        lane = Lane.LIVE if short else Lane.BULK
        most = self._settings.max_input_tokens
        for first in range(start, session.length, most):
            tokens = tuple(session.log[first : first + most])
            self._send(hop, Input(hop.server_handle, session.epoch, first, tokens), lane)

    def grant_credit(self, session: Session) -> None:
        """Tell the tail how far the reader is, when it is worth a message (R7)."""
        if (
            session.state is not SessionState.RUNNING
            or session.read_only
            or session.credit_cap == 0
        ):
            return
        credit = session.target_credit()
        if credit - session.credit >= session.credit_step:
            self._send_credit(session, credit)

    def quiesce(self, sessions: Sequence[Session]) -> None:
        """They come to rest, each after as many tokens as the others if its reader lets it (R7): what shares steps goes
        on sharing them, and is not divided among many small ones."""
        left = [session.credit + 1 - session.length for session in sessions]
        last = max((tokens for tokens in left if tokens <= MAX_TOKENS_TO_QUIESCE), default=0)
        for session, tokens in zip(sessions, left, strict=True):
            session.credit_cap = 0
            credit = min(session.length - 1 + last, session.read_position + session.credit_ahead)
            if tokens > 0 and credit > session.credit and not session.read_only:
                self._send_credit(session, credit)

    def _send_credit(self, session: Session, credit: int) -> None:
        session.credit = credit
        tail = session.hops[-1]
        self._send(tail, Window(tail.server_handle, session.epoch, received=0, limit=credit))

    def _send(self, hop: Hop, message: Message, lane: Lane = Lane.LIVE) -> None:
        self._emit(Send(hop.server, lane, message))


def _neighbour(hop: Hop) -> Neighbour:
    return Neighbour(hop.server, hop.server_handle)
