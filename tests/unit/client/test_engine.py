"""The end of an engine, at a foreign gateway."""

from __future__ import annotations

import pytest
from unit.client.api.test_retries import Answer, server

from modelswarm import Engine
from modelswarm.client.api import ClosedClientError
from modelswarm.client.sessions.errors import SessionBusyError
from modelswarm.errors import UserError


class Used:
    """A session that another thread uses."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

    def close(self) -> None:
        raise SessionBusyError("the session runs a step")


def test_session_in_use_does_not_keep_an_engine_open() -> None:
    with server(Answer()) as gateway:
        engine = Engine(gateway.url)
        used = Used()
        engine.adopt_session(used)
        with pytest.raises(SessionBusyError):
            engine.close()
        with pytest.raises(ClosedClientError):
            engine.encode("a")
        with pytest.raises(UserError, match="closed"):
            engine.generate("a")
