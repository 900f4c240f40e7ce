"""Sessions are closed for their clients: not under a turn that begins meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation import session_locator
from modelswarm_gateway.generation.session_control import close_session, session_state
from tools.dashboard.metric_registries import MODEL


async def test_turn_that_begins_while_its_session_is_searched_goes_on() -> None:
    service, node = await make_service_with_files(model_files())
    key, sessions = (MODEL, "a"), service.named_sessions
    sessions.acquire(key)
    sessions.release(key)  # on no server: the only one is asked for it
    closing = asyncio.create_task(close_session(service, key))
    await asyncio.sleep(0)
    sessions.acquire(key)
    node.on_link_down("s0/1/x", "it ends the search")
    with pytest.raises(ApiError) as refused:
        await asyncio.wait_for(closing, SECONDS)
    assert refused.value.code is Code.SESSION_BUSY
    assert sessions.is_busy(key)


async def test_searches_of_clients_that_begin_no_turn_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only server answers none: a client could else ask all servers as often as it has connections."""
    monkeypatch.setattr(session_locator, "MAX_SEARCHES", 2)
    service, node = await make_service_with_files(model_files())
    asking = [
        asyncio.create_task(session_state(service, (MODEL, "a"))),
        asyncio.create_task(close_session(service, (MODEL, "b"))),
    ]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await asyncio.wait_for(session_state(service, (MODEL, "c")), SECONDS)
    assert (refused.value.code, refused.value.retry_after) == (Code.NO_CAPACITY, 1.0)
    node.on_link_down("s0/1/x", "it ends the searches")
    async with asyncio.timeout(SECONDS):
        assert await asyncio.gather(*asking) == [None, False]
    assert await session_state(service, (MODEL, "c")) is None
