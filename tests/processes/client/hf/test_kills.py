"""A server that is killed in the middle changes no token, wherever the tokens are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eventually import eventually
from support.processes.swarm import Running

from modelswarm.client.hf import AutoDistributedModelForCausalLM
from modelswarm.protocol.wire import api_pb2

PROMPTS = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100], [90, 91, 92, 93, 94, 95, 96, 97]])
PADDED = torch.tensor([[0, 0, 0, 65, 12, 200], [90, 91, 92, 93, 94, 95]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
ENDLESS: dict[str, Any] = {"eos_token_id": None, "max_new_tokens": 60}
GREEDY: dict[str, Any] = {"do_sample": False, **ENDLESS}


class Killer:
    """A streamer that kills the last server of a running session once, at its fifth call."""

    def __init__(self, swarm: Running) -> None:
        self._swarm, self.calls = swarm, 0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 5:
            self._swarm.kill(self._newest_route()[-1].peer)

    def end(self) -> None:
        pass

    def _newest_route(self) -> Sequence[api_pb2.Hop]:
        """Return the route of the session that began last. A session of an earlier test may still be open."""
        sessions = self._swarm.sessions
        return eventually("it has a route", lambda: [s.route for s in sessions() if s.route])[-1]


def generate_with_a_kill(swarm: Running, model: Any, ids: Any, **wanted: Any) -> Any:
    """Return the result of `generate` during which a server was killed."""
    swarm.wait_whole()
    before, killer = swarm.faults(), Killer(swarm)
    made = model.generate(ids, streamer=killer, **wanted)
    assert killer.calls > 5, "it goes on behind the kill"
    assert swarm.faults().reroutes > before.reroutes
    return made


@pytest.fixture(scope="module")
def drawing(toy_swarm: Running, toy_folder: Path) -> Any:
    """Return the model that draws its tokens at the client."""
    return AutoDistributedModelForCausalLM.from_pretrained(
        toy_folder, gateway=toy_swarm.local.grpc, sampling="client"
    )


@pytest.mark.full
def test_kill_changes_no_token_drawn_at_the_client(
    toy_swarm: Running, drawing: Any, toy_model: Any
) -> None:
    wanted = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, **ENDLESS}
    torch.manual_seed(4)
    whole = toy_model.generate(PROMPTS, **wanted)
    torch.manual_seed(4)
    assert torch.equal(generate_with_a_kill(toy_swarm, drawing, PROMPTS, **wanted), whole)


@pytest.mark.full
@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "assistant_model"])
def test_kill_changes_no_draft(toy_swarm: Running, model: Any, toy_model: Any, name: str) -> None:
    repeated = torch.cat([PROMPTS[:1], PROMPTS[:1]], dim=1)
    whole = toy_model.generate(repeated, **GREEDY)
    wanted = {name: 3 if name.startswith("prompt") else toy_model, **GREEDY}
    ours = generate_with_a_kill(toy_swarm, model, repeated, **wanted)
    assert torch.equal(ours, whole)


@pytest.mark.full
@pytest.mark.parametrize("penalty", [1.3, 12.0], ids=["servers", "client"])
def test_kill_changes_no_row_of_a_padded_batch(
    toy_swarm: Running, model: Any, toy_model: Any, penalty: float
) -> None:
    """Servers take penalties to 10; beyond, tokens are chosen at the client."""
    wanted = {"attention_mask": MASK, "repetition_penalty": penalty, **GREEDY}
    if penalty < 10:
        wanted["max_new_tokens"] = 400
    whole = toy_model.generate(PADDED, **wanted)
    assert torch.equal(generate_with_a_kill(toy_swarm, model, PADDED, **wanted), whole)
