"""A forward over `past_key_values` that fails: the caller may repeat it, and no token counts twice."""

from __future__ import annotations

import pytest
import torch

from modelswarm.client.hf.remote_cache import RemoteCache
from modelswarm.client.sessions.errors import NoCapacityError
from modelswarm.client.sessions.session import GatewaySession

IDS = torch.tensor([[5, 6, 7]])


def no_room() -> GatewaySession:
    raise NoCapacityError("no free KV", 1.0)


def test_failed_forward_appends_no_tokens() -> None:
    cache = RemoteCache(no_room, 97)
    for _ in range(2):
        with pytest.raises(NoCapacityError):
            cache.forward(IDS, None, 1)
        assert cache.get_seq_length() == 0
        cache.check(torch.cat([IDS, IDS]))  # any batch may come next
