"""Messages to hops: Fence, StartEpoch, CopyKv, Input and Window.

Used by the recovery loop (`recovery/recovery.py`), by migrations and by `gateway.py`, which decide; this module only
builds and sends. It changes a session only by what it sent: the granted credit and the epoch of a create.
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
    Turn,
    Window,
)
from modelswarm.protocol.opaque import block_rows, join_rows, split_entries
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.sessions.replay_plan import RestartPoint
from modelswarm_gateway.core.sessions.session import Hop, Session, SessionState

NO_TURN = Turn(reserved_positions=0, end=0)  # a hop keeps only the pages of its KV (R8, parked)
MAX_INPUT_ROW_BYTES = 128 << 10  # rows of opaque entries in one Input
MAX_TOKENS_TO_QUIESCE = 8  # tokens: most credit a session gets to quiesce together with others


class HopMessages:
    def __init__(self, settings: GatewaySettings, emit: Callable[[Effect], None]) -> None:
        self._settings = settings
        self._emit = emit

    def send_fence(
        self,
        session: Session,
        hop: Hop,
        *,
        parked: bool = False,
        released: bool = False,
        for_recovery: bool = False,
    ) -> None:
        """Fence the hop; create it if its server handle is unknown.

        `parked`: the hop will not run. `released`: and keeps only the pages of its KV.
        """
        hop.fence_epoch, create = session.epoch, None
        if hop.server_handle == NO_HANDLE:
            for_recovery = for_recovery or (
                session.has_run and (session.is_recovering or session.turn.session_length > 0)
            )
            parent = session.fork.source_of(hop) if session.fork else None
            create = Create(
                session.name, hop.first, hop.last, for_recovery=for_recovery, parent=parent
            )
            hop.create_epoch = session.epoch
            if parent is not None:
                hop.is_round_trip_timed = False  # the answer waits for the copy
        is_new = create is not None or hop.accepted_turn != session.turn_number
        turn = session.turn if is_new and not parked else None
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
                turn=NO_TURN if released else turn,
                last_started=session.last_started,
            ),
        )

    def start_hop(self, session: Session, index: int, point: RestartPoint) -> None:
        """Start the epoch on the hop at `index` of the route."""
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
        if index > 0 and not tail:  # head and tail have them with the log
            self._send_block_rows(session, hop, point.start)

    def start_copy(self, session: Session, old: Hop, hop: Hop) -> None:
        """Start a hop beside the route as standby and tell the old hop to send it its KV (R13, migration)."""
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
                sample=not session.prefill_only,
                standby=standby,
            ),
        )

    def send_log(self, session: Session, hop: Hop, start: int, *, standby: bool = False) -> None:
        """Send the log's entries from `start` on to a head or a tail.

        A standby gets more of them later: all go on one lane, or the short ones would overtake the first.
        """
        short = session.length - start <= self._settings.max_live_input_tokens and not standby
        lane = Lane.LIVE if short and not session.opaque else Lane.BULK
        most = self._settings.max_input_tokens
        for first, end in split_entries(
            start, session.length, session.opaque, most, MAX_INPUT_ROW_BYTES
        ):
            tokens = tuple(session.log[first:end])
            rows = join_rows(session.opaque, first, end)
            self._send(hop, Input(hop.server_handle, session.epoch, first, tokens, rows), lane)

    def _send_block_rows(self, session: Session, hop: Hop, start: int) -> None:
        """Send a hop the rows that its blocks add to those of entries from `start` on (R14, opaque rows)."""
        end = session.turn.prompt_rows
        size = session.boundary_row_bytes
        most = max(1, MAX_INPUT_ROW_BYTES // (size * (hop.last - hop.first) or 1))
        for first in range(start, end, most):
            places = range(first, min(end, first + most))
            rows = [block_rows(session.opaque[at], size, hop.first, hop.last) for at in places]
            tokens = tuple(session.log[at] for at in places)
            entries = Input(hop.server_handle, session.epoch, first, tokens, b"".join(rows))
            self._send(hop, entries, Lane.BULK)

    def grant_credit(self, session: Session) -> None:
        """Grant the tail credit for what the client has read, if the increase is worth a message (R7, credit)."""
        if (
            session.state is not SessionState.RUNNING
            or session.prefill_only
            or session.credit_cap == 0
        ):
            return
        credit = session.target_credit()
        if credit - session.credit >= session.credit_step:
            self._send_credit(session, credit)

    def quiesce(self, sessions: Sequence[Session]) -> None:
        """Make the sessions quiescent after the same number of tokens, if their clients read fast enough (R7, credit).

        Sessions that share steps then go on sharing them until the end, instead of being split into many small steps.
        """
        tokens_left = [session.credit + 1 - session.length for session in sessions]
        last = max((tokens for tokens in tokens_left if tokens <= MAX_TOKENS_TO_QUIESCE), default=0)
        for session, tokens in zip(sessions, tokens_left, strict=True):
            session.credit_cap = 0
            credit = min(session.length - 1 + last, session.read_position + session.credit_ahead)
            if tokens > 0 and credit > session.credit and not session.prefill_only:
                self._send_credit(session, credit)

    def _send_credit(self, session: Session, credit: int) -> None:
        session.credit = credit
        tail = session.hops[-1]
        self._send(tail, Window(tail.server_handle, session.epoch, received=0, limit=credit))

    def _send(self, hop: Hop, message: Message, lane: Lane = Lane.LIVE) -> None:
        self._emit(Send(hop.server, lane, message))


def _neighbour(hop: Hop) -> Neighbour:
    return Neighbour(hop.server, hop.server_handle)
