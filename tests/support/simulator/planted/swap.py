"""Builds product cores in which one part has the class of a planted bug.

Used by `catalog.py`. The part is read by attribute, so a renamed attribute raises, and its class must be a base of the
bug's. Overridden methods carry `@override`, which mypy checks.
"""

from __future__ import annotations

from collections.abc import Callable

from support.simulator.actors.server_process import MakeGateway, MakeServer

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape


def server_with(part: Callable[[ServerCore], object], bug: type) -> MakeServer:
    """Return a factory of server cores in which `part` has the class `bug`."""

    def make(settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]) -> ServerCore:
        core = ServerCore(settings, shape, draw)
        swap_class(part(core), bug)
        return core

    return make


def gateway_with(part: Callable[[GatewayCore], object], bug: type) -> MakeGateway:
    """Return a factory of gateway cores in which `part` has the class `bug`."""

    def make(
        settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> GatewayCore:
        core = GatewayCore(settings, peer, incarnation, draw)
        swap_class(part(core), bug)
        return core

    return make


def swap_class(part: object, bug: type) -> None:
    if not issubclass(bug, type(part)):
        raise TypeError(f"{bug.__name__} does not derive from {type(part).__name__}")
    part.__class__ = bug
