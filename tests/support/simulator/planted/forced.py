"""Planted bugs in the groups of forced tokens (R17, sampling).

Each class is a product class with one rule broken and nothing else; `catalog.py` names the scenario that finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from typing_extensions import override

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Send, Token
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape, Result


class ForcesOldTokens(ServerCore):
    """A tail keeps what was forced at a position of a session, and forces it again after another log."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        self._forced: dict[tuple[str, int], tuple[int, ...]] = {}

    @override
    def finish_step(self, results: Sequence[Result], now: float) -> None:
        running = self._steps._running
        made = list(results)
        for at, ((hop, work), result) in enumerate(zip(running, results, strict=False)):
            if result.sampled is not None and work.sample is not None and work.sample.max_forced:
                kept = self._forced.setdefault(
                    (hop.session, work.sample.position), result.sampled.forced
                )
                forced = kept[: work.sample.max_forced]
                made[at] = replace(result, sampled=replace(result.sampled, forced=forced))
        super().finish_step(made, now)


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
