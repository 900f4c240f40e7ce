"""Sessions are closed for their clients: not under a turn that begins meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.session_control import close_session
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
