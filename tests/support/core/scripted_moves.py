"""A session that is to leave its tail, on scripted servers."""

from __future__ import annotations

from support.core.scripted_servers import Script

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.interface.effects import MigrationEnded, Rerouted
from modelswarm_gateway.core.interface.settings import GatewaySettings

PROMPT = tuple(range(1, 21))
AHEAD = 3  # tokens: it comes to rest when the log has 24 entries
TICK = 0.05  # a wave comes to rest in one


def two_spans(settings: GatewaySettings | None = None) -> tuple[Script, str, str]:
    """Head `a`, and a tail that is `b` or `c`; one session runs over a and the first of these."""
    script = Script(settings or GatewaySettings())
    script.serve("a", 0, 2)
    old = script.serve("b", 2, 4)
    script.ask("s", PROMPT, credit_ahead=AHEAD)
    script.token("s")
    new = script.serve("c", 2, 4)
    assert script.route("s") == ["a", "b"]
    script.sent.clear()
    script.effects.clear()
    return script, old, new


def outcomes(script: Script) -> list[str]:
    return [effect.outcome for effect in script.effects if isinstance(effect, MigrationEnded)]


def reroutes(script: Script) -> list[str]:
    return [effect.cause for effect in script.effects if isinstance(effect, Rerouted)]


def leave(script: Script, peer: PeerId) -> None:
    script.core.migrations.drain(peer, "drain", script.now)
    script.run()
