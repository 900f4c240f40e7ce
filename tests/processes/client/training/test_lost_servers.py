"""Passes on real servers that are killed, frozen, stopped, too small, or busy with streams."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes.client.training.test_layer_gradients import close, gradients, local, states
from support.eventually import eventually
from support.ports import free_port
from support.processes.streams import Request
from support.processes.swarm import Running, local_settings, metrics, running_swarm, total
from torch import Tensor

from modelswarm.client.hf import AutoDistributedModelForCausalLM
from modelswarm.client.sessions.base import RECONNECT_SECONDS
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.errors import ConnectionLostError, RefusedError
from modelswarm.client.training.passes import Batch, BlockPasses, Piece
from modelswarm.local.run_folder import GATEWAY_JOB

PARTS = "modelswarm_server_pass_part_seconds_count"
LENGTH = 900


def parts(running: Running) -> dict[str, int]:
    """Return the parts of passes that each server has run."""
    return {member.name: int(total(metrics(member.metrics), PARTS)) for member in running.members()}


class InThread:
    """A function that runs beside the test."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self._found = run, None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        try:
            self._found = self._run()
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(300)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._found


def wait_for_part(running: Running, before: dict[str, int], span: str) -> str:
    """Wait until a server of the span runs a pass, and return its name."""

    def find() -> str:
        now = parts(running)
        return next((n for n in now if span in n and now[n] > before.get(n, 0)), "")

    return eventually("a server runs a pass", find)


def peer_of(running: Running, name: str) -> str:
    return next(member.peer for member in running.members() if member.name == name)


def kill_in_pass(running: Running, before: dict[str, int], span: str) -> None:
    """Send SIGKILL to a server of the span once it runs a pass. In `before` its next process has run nothing."""
    name = wait_for_part(running, before, span)
    running.kill(peer_of(running, name))
    del before[name]


def parts_by_span(running: Running, before: dict[str, int]) -> list[int]:
    """Return the parts that the servers of each span have run since then."""
    new = {name: count - before.get(name, 0) for name, count in parts(running).items()}
    return [sum(new[name] for name in new if span in name) for span in ("-s0-", "-s1-")]


@pytest.mark.full
def test_kill_costs_its_piece_of_the_pass_again(
    toy_swarm: Running, model: Any, toy_model: Any
) -> None:
    """A server is killed in the forward pass, and another one in the backward pass. No gradient changes."""
    toy_swarm.wait_whole()
    ours, theirs = states(4, LENGTH), states(4, LENGTH)
    before = parts(toy_swarm)
    output = model.model.layers(ours)
    forward = parts_by_span(toy_swarm, before)
    before = parts(toy_swarm)
    gradients(output, [ours])
    backward = parts_by_span(toy_swarm, before)

    before = parts(toy_swarm)
    running = InThread(lambda: model.model.layers(ours))
    kill_in_pass(toy_swarm, before, "-s0-")
    output = running.result()
    toy_swarm.wait_whole()
    assert parts_by_span(toy_swarm, before) == forward
    before = parts(toy_swarm)
    running = InThread(lambda: gradients(output, [ours]))
    kill_in_pass(toy_swarm, before, "-s1-")
    (found,) = running.result()
    toy_swarm.wait_whole()
    assert parts_by_span(toy_swarm, before) == backward

    right = local(toy_model, theirs, 0, 8)
    assert close(output, right)
    assert close(found, gradients(right, [theirs])[0])


@pytest.mark.full
def test_lost_gateway_costs_a_piece_again(toy_swarm: Running, model: Any, toy_model: Any) -> None:
    """The gateway is killed in a pass, and comes back at its address."""
    toy_swarm.wait_whole()
    ours, theirs = states(4, LENGTH), states(4, LENGTH)
    before = parts(toy_swarm)
    forward = InThread(lambda: model.model.layers(ours))
    wait_for_part(toy_swarm, before, "-s1-")
    toy_swarm.local.kill(GATEWAY_JOB)
    output, right = forward.result(), local(toy_model, theirs, 0, 8)
    assert close(output, right)
    toy_swarm.wait_whole()
    assert close(gradients(output, [ours])[0], gradients(right, [theirs])[0])


def test_no_gateway_is_an_error_at_the_deadline() -> None:
    clock = itertools.count(0, RECONNECT_SECONDS / 3)
    passes = BlockPasses(
        Connection(f"127.0.0.1:{free_port()}"),
        ServedModel("toy", 1024, 8, 128, "float32"),
        lambda: next(clock),
    )
    with pytest.raises(ConnectionLostError):
        passes.run_forward(0, 2, Batch((1,), 0, (), 0), bytes(512))


@pytest.mark.full
def test_piece_of_two_servers_is_split(toy_swarm: Running, model: Any, toy_model: Any) -> None:
    """No server has all blocks of the piece: its forward pass is run again, in two pieces."""
    toy_swarm.wait_whole()
    given = states(1, 30)
    right = local(toy_model, given, 2, 6)
    wanted = torch.randn(right.shape, generator=torch.Generator().manual_seed(2))
    (expected,) = torch.autograd.grad(right, [given], wanted)
    layers = model.model.layers
    passes = BlockPasses(layers._connection, layers._served)
    piece = Piece(2, 6, raw(given.detach()))
    found = passes.run_backward([piece], Batch((30,), 0, (), 2), raw(wanted))
    assert close(
        torch.frombuffer(bytearray(found.rows), dtype=torch.float32).view(1, 30, 128), expected
    )


def raw(rows: Tensor) -> bytes:
    return rows.contiguous().numpy().tobytes()


def test_streams_go_on_beside_a_long_pass(toy_swarm: Running, model: Any) -> None:
    """The pass has hundreds of parts, the stream some steps, and each step waits for one part at most."""
    toy_swarm.wait_whole()
    before = parts(toy_swarm)
    ours = states(6, LENGTH)
    long = InThread(lambda: gradients(model.model.layers[:4](ours), [ours]))
    wait_for_part(toy_swarm, before, "-s0-")
    answer = toy_swarm.ask(Request((1, 2, 3), 24))
    assert len(answer.tokens) == 24
    assert long.is_running, "the stream waited for the whole pass"
    long.result()


@pytest.mark.full
def test_stopping_server_ends_its_pass(toy_swarm: Running, model: Any, toy_model: Any) -> None:
    """SIGTERM in a pass: it is completed there, and nothing of it is run again at the replica."""
    toy_swarm.wait_whole()
    before = parts(toy_swarm)
    given = states(4, LENGTH)  # one call
    forward = InThread(lambda: model.model.layers[:4](given))
    name = wait_for_part(toy_swarm, before, "-s0-")
    toy_swarm.local.kill(name, signal.SIGTERM)
    assert close(forward.result(), local(toy_model, given, 0, 4))
    other = next(each for each in before if "-s0-" in each and each != name)
    assert parts(toy_swarm)[other] == before[other]
    toy_swarm.wait_whole()


@pytest.fixture(scope="module")
def watched(toy_folder: Path) -> Iterator[Running]:
    """Yield two replicas of one span, whose gateway notices silence. The memory for passes is small."""
    settings = local_settings("watched", detects_silence=True)
    small = {"memory": "3Mi"}
    with running_swarm(
        toy_folder, "watched", spans=1, replicas=2, settings=settings, training=small
    ) as running:
        yield running


@pytest.fixture(scope="module")
def layers(watched: Running, toy_folder: Path) -> Any:
    found = AutoDistributedModelForCausalLM.from_pretrained(toy_folder, gateway=watched.local.grpc)
    return found.model.layers


@pytest.mark.full
def test_frozen_server_costs_its_pass_again(watched: Running, layers: Any, toy_model: Any) -> None:
    watched.wait_whole()
    given = states(2, 400)
    right = local(toy_model, given, 0, 8)
    before = parts(watched)
    forward = InThread(lambda: layers(given))
    frozen = wait_for_part(watched, before, "-s0-")
    watched.local.kill(frozen, signal.SIGSTOP)
    try:
        assert close(forward.result(), right)
    finally:
        watched.local.kill(frozen, signal.SIGCONT)


@pytest.mark.full
def test_small_memory_runs_fewer_blocks_at_a_time(
    watched: Running, layers: Any, toy_model: Any
) -> None:
    """A sequence of 400 rows: three blocks and more do not fit into 3 MiB."""
    watched.wait_whole()
    ours, theirs = states(2, 400), states(2, 400)
    output, right = layers(ours), local(toy_model, theirs, 0, 8)
    assert [len(run.pieces) > 1 for run in output.grad_fn.runs] == [True, True]
    assert close(output, right)
    assert close(gradients(output, [ours])[0], gradients(right, [theirs])[0])


@pytest.mark.full
def test_pass_that_never_fits_is_refused(watched: Running, layers: Any) -> None:
    watched.wait_whole()
    told = r"900 rows of 1 block need .* has 3 MiB \(spec\.training\.memory"
    with pytest.raises(RefusedError, match=told):
        layers(states(1, 900))
    with pytest.raises(RefusedError, match="a sequence of 1025 rows; the context has 1024"):
        layers(states(1, 1025))
