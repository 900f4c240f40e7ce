"""Server registry: which servers lost their link. Time is virtual."""

from __future__ import annotations

from support.core.fleets import hello, registry_of
from support.core.server import MODEL

SERVER = hello("a")


def test_server_that_reconnects_is_not_unlinked() -> None:
    registry = registry_of(SERVER)
    registry.deregister(SERVER.peer, now=3.0)
    assert registry.unlinked_since(MODEL, 2.0) == {SERVER.peer}
    assert registry.register(SERVER, now=4.0)
    assert registry.unlinked_since(MODEL, 2.0) == set()


def test_unlinked_server_counts_from_its_newest_loss() -> None:
    registry = registry_of(SERVER)
    registry.deregister(SERVER.peer, now=3.0)
    assert registry.unlinked_since(MODEL, 3.0) == set()
    assert registry.register(SERVER, now=4.0)
    registry.deregister(SERVER.peer, now=5.0)
    assert registry.unlinked_since(MODEL, 3.0) == {SERVER.peer}
