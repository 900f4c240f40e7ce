"""Planted bugs in sampling (R17): parameters of a turn are lost when it moves, logprobs and forced tokens go wrong.

As in `protocol.py`: subclasses of product classes, one rule broken in each. `without_` names what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from typing_extensions import override

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import Sampling, Send, Token, TopLogprob
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.session_search import FetchedLog
from modelswarm_gateway.core.interface.turn import ParkedTurn, TurnRequest
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.sessions.session import Hop, Session
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape, Result


def without_penalties(sampling: Sampling) -> Sampling:
    return replace(sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)


def without_bias(sampling: Sampling) -> Sampling:
    return replace(sampling, logit_bias=())


def without_grammar(sampling: Sampling) -> Sampling:
    return replace(sampling, grammar=None)


def without_logprobs(sampling: Sampling) -> Sampling:
    return replace(sampling, logprobs=0)


# -- new hops ----------------------------------------------------------------------------------


class ForgetfulRecovery(Recovery):
    """New hops of a turn that has run get its parameters without a part of them."""

    lose: Callable[[Sampling], Sampling]

    def _without(self, session: Session, send: Callable[[], None]) -> None:
        turn = session.turn
        session.turn = replace(turn, sampling=type(self).lose(turn.sampling))
        send()
        session.turn = turn


class LosesAtReplay(ForgetfulRecovery):
    """R6 (replay): a hop that replaces a lost one."""

    @override
    def send_fences(self, session: Session, now: float) -> None:
        if session.fault_at is None:
            super().send_fences(session, now)
        else:
            self._without(session, lambda: super(LosesAtReplay, self).send_fences(session, now))


class LosesAtMigration(ForgetfulRecovery):
    """R13 (migration): a hop beside the route."""

    @override
    def open_copy_target(self, session: Session, hop: Hop) -> None:
        self._without(session, lambda: super(LosesAtMigration, self).open_copy_target(session, hop))


def lost_at_replay(lose: Callable[[Sampling], Sampling]) -> type:
    return type("LosesAtReplay", (LosesAtReplay,), {"lose": staticmethod(lose)})


def lost_at_migration(lose: Callable[[Sampling], Sampling]) -> type:
    return type("LosesAtMigration", (LosesAtMigration,), {"lose": staticmethod(lose)})


# -- takeover and resumption -------------------------------------------------------------------


class LosesAtTakeover(GatewayCore):
    """R20 (takeover): a gateway gets the log of another one's turn, and a part of the parameters."""

    lose: Callable[[Sampling], Sampling]

    @override
    def take_effects(self) -> list[Effect]:
        return [self._without(effect) for effect in super().take_effects()]

    def _without(self, effect: Effect) -> Effect:
        if not isinstance(effect, FetchedLog) or effect.turn is None:
            return effect
        sampling = type(self).lose(effect.turn.sampling)
        return replace(effect, turn=replace(effect.turn, sampling=sampling))


def lost_at_takeover(lose: Callable[[Sampling], Sampling]) -> type[GatewayCore]:
    return type("LosesAtTakeover", (LosesAtTakeover,), {"lose": staticmethod(lose)})


class BeginsResumedTurnsAnew(GatewayCore):
    """R17 (sampling): penalties and grammar of a resumed turn do not count what it generated before."""

    @override
    def start_turn(self, session: str, request: TurnRequest, now: float) -> int:
        return super().start_turn(session, replace(request, begin=None), now)


# -- logprobs ----------------------------------------------------------------------------------


class ShiftsTop(ServerCore):
    """R6 (replay): the first token of an epoch has the alternatives of the token before it."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        self._last: dict[PeerId, tuple[int, Epoch, tuple[TopLogprob, ...]]] = {}

    @override
    def take_sends(self) -> list[Send]:
        gateways = self._peers.gateways
        return [
            replace(send, item=self._shifted(send.item))
            if isinstance(send.item, Token) and send.to.peer in gateways
            else send
            for send in super().take_sends()
        ]

    def _shifted(self, token: Token) -> Token:
        key = str(token.handle)
        position, epoch, top = self._last.get(key, (-1, token.epoch, ()))
        self._last[key] = token.position, token.epoch, token.top
        is_next = position + 1 == token.position and epoch != token.epoch
        return replace(token, top=top) if is_next and token.top else token


class KeepsShiftedLogprobs(GatewayCore):
    """R17 (sampling): the log probabilities that are kept for a resumed stream are one position off."""

    @override
    def parked_turn(self, session: str) -> ParkedTurn | None:
        kept = super().parked_turn(session)
        if kept is None:
            return None
        shifted = {
            at: kept.logprobs.get(at - 1, logprobs) for at, logprobs in kept.logprobs.items()
        }
        return replace(kept, logprobs=shifted)


# -- forced tokens -------------------------------------------------------------------------------


class ForcesOldTokens(ServerCore):
    """A tail keeps what was forced at a position of a session, and forces it again after another log."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        self._forced: dict[tuple[str, int], tuple[int, ...]] = {}

    @override
    def finish_step(
        self, results: Sequence[Result], now: float, worked: float | None = None
    ) -> None:
        running = self._steps._running
        made = list(results)
        for at, ((hop, work), result) in enumerate(zip(running, results, strict=False)):
            if result.sampled is not None and work.sample is not None and work.sample.max_forced:
                kept = self._forced.setdefault(
                    (hop.session, work.sample.position), result.sampled.forced
                )
                forced = kept[: work.sample.max_forced]
                made[at] = replace(result, sampled=replace(result.sampled, forced=forced))
        super().finish_step(made, now, worked)


class LogsNoForcedTokens(GatewayCore):
    """The gateway shows forced tokens and logs only the sampled one, so a recovery generates them again."""

    @override
    def _on_token(self, peer: PeerId, token: Token, now: float) -> None:
        session = self._session_of_tail(peer, token)
        before = 0 if session is None else session.length
        super()._on_token(peer, token, now)
        if session is not None and token.forced and session.length > before:
            del session.log[before + 1 :]


class SendsNoForcedTokens(ServerCore):
    """The tail sends the head the sampled token without those forced after it, and waits for their rows."""

    @override
    def take_sends(self) -> list[Send]:
        gateways = self._peers.gateways
        return [
            replace(send, item=replace(send.item, forced=()))
            if isinstance(send.item, Token) and send.to.peer not in gateways
            else send
            for send in super().take_sends()
        ]
