"""`model.model.layers[a:b]` takes and gives hidden states; they are those of transformers with the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.processes.oracles import TAU
from support.processes.swarm import Running

from modelswarm.client.hf.errors import ArgumentError, UnsupportedArgumentError
from modelswarm.client.sessions.errors import (
    NoCapacityError,
    SessionClosedError,
    SessionLengthError,
)

PROMPTS = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100], [90, 91, 92, 93, 94, 95, 96, 97]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])


def states_of(whole: Any, ids: Any = PROMPTS, **wanted: Any) -> Any:
    with torch.no_grad():
        return whole(ids, output_hidden_states=True, **wanted)


def close(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() < TAU)


def test_ranges_give_the_hidden_states_of_transformers(model: Any, toy_model: Any) -> None:
    """Two servers have four blocks each: ranges begin and end at their boundaries, and inside."""
    right = states_of(toy_model).hidden_states
    layers, count = model.model.layers, len(toy_model.model.layers)
    assert len(layers) == count == 8
    for first, last in ((0, 4), (2, 6), (0, 7), (5, 6)):
        assert close(layers[first:last](right[first]), right[last]), (first, last)
    assert close(layers[-1](right[7]), layers[7:8](right[7]))
    found = right[0]
    for layer in layers:
        found = layer(found)
    assert close(found, layers(right[0]))
    assert len(layers[1:][0:2]) == 2
    assert (layers[1:][0].first, layers[1:][0].last) == (1, 2)


@pytest.mark.full
def test_embeddings_blocks_and_head_equal_the_whole_model(model: Any, toy_model: Any) -> None:
    right = states_of(toy_model)
    embed, body = model.get_input_embeddings(), model.model
    assert body.embed_tokens is embed
    with torch.no_grad():
        hidden = embed(PROMPTS)
        middle = body.layers[:5](hidden)
        logits = model.lm_head(body.norm(body.layers[5:](middle)))
    assert close(middle, right.hidden_states[5])
    assert close(logits, right.logits)
    assert model.get_output_embeddings() is model.lm_head
    parts = torch.nn.Sequential(embed, body.layers[:2], body.layers[2:], body.norm, model.lm_head)
    assert close(parts(PROMPTS), right.logits)


@pytest.mark.full
def test_forward_returns_hidden_states(model: Any, toy_model: Any) -> None:
    right = states_of(toy_model)
    ours = model(PROMPTS, output_hidden_states=True)
    assert close(ours.logits, right.logits)
    assert len(ours.hidden_states) == len(right.hidden_states) == 9
    assert all(map(close, ours.hidden_states, right.hidden_states))
    assert close(
        model(PROMPTS, output_hidden_states=True, logits_to_keep=2).logits, right.logits[:, -2:]
    )
    padded = model(PROMPTS, attention_mask=MASK, output_hidden_states=True)
    alone = states_of(toy_model, PROMPTS[:1, 3:])
    for ours_at, alone_at in zip(padded.hidden_states, alone.hidden_states, strict=True):
        assert close(ours_at[:1, 3:], alone_at)
    assert close(padded.logits[:1, 3:], alone.logits)
    assert close(padded.logits[1:], right.logits[1:])
    with pytest.raises(UnsupportedArgumentError, match="use_cache"):
        model(PROMPTS, output_hidden_states=True, use_cache=True)


@pytest.mark.full
def test_session_keeps_the_kv_of_its_steps(model: Any, toy_model: Any) -> None:
    """Petals' test_chained_inference_exact_match and test_remote_block_with_cache_invalidation_exact_match."""
    right = states_of(toy_model).hidden_states
    with model.model.layers[1:6].inference_session(max_length=8, batch_size=2) as session:
        parts = [
            session.step(right[1][:, begin:end]) for begin, end in ((0, 1), (1, 1), (1, 6), (6, 8))
        ]
        assert close(torch.cat(parts, dim=1), right[6])
        assert session.position == 8
        with pytest.raises(SessionLengthError, match="maximum length exceeded"):
            session.step(right[1][:, :1])
        session.position = 2
        other = states_of(toy_model, PROMPTS.flip(1)).hidden_states[1][:, :3]
        again = session.step(other)
        clean = model.model.layers[1:6](torch.cat([right[1][:, :2], other], dim=1))
        assert close(again, clean[:, 2:])
        with pytest.raises(ArgumentError, match="opened for 2"):
            session.step(other[:1])
    with pytest.raises(SessionClosedError):
        session.step(other)


def test_failed_step_appends_nothing_to_any_row(model: Any, toy_model: Any) -> None:
    """One row of the batch fails behind the others: a repeated step must not have their positions twice."""
    right = states_of(toy_model).hidden_states[1]
    with model.model.layers[1:6].inference_session(max_length=8, batch_size=2) as session:
        session.step(right[:, :3])
        session._rows[1].close()
        for _ in range(2):
            with pytest.raises(SessionClosedError):
                session.step(right[:, 3:])
            assert session.position == 3


@pytest.mark.full
def test_killed_servers_change_no_row(toy_swarm: Running, model: Any, toy_model: Any) -> None:
    """A server is killed between two steps, and another one while rows of a long input come."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 320, (1, 400), generator=generator)
    right = states_of(toy_model, ids).hidden_states
    toy_swarm.wait_whole()
    with model.model.layers[:7].inference_session(max_length=400) as session:
        parts = []
        for at in range(0, 400, 40):
            if at in (80, 200):
                toy_swarm.kill(toy_swarm.only_session().route[at // 200].peer)
            parts.append(session.step(right[0][:, at : at + 40]))
        assert close(torch.cat(parts, dim=1), right[7])
    toy_swarm.wait_whole()
    assert not toy_swarm.sessions()


WRONG = [
    (torch.zeros(8, 64), "the shape is"),
    (torch.zeros(1, 8, 63), "the shape is"),
    (torch.zeros(1, 0, 64), "the shape is"),
    (torch.zeros(1, 8, 64, dtype=torch.int64), "the dtype is"),
    (torch.full((1, 8, 64), float("nan")), "infinite or NaN"),
    ([1.0], "a list"),
]


@pytest.mark.full
def test_wrong_inputs_are_refused_by_name(model: Any) -> None:
    layers = model.model.layers
    width = model.get_input_embeddings().weight.shape[1]
    for states, sentence in WRONG:
        if isinstance(states, torch.Tensor) and states.shape[-1] == 64:
            states = states[..., :1].expand(*states.shape[:-1], width)
        with pytest.raises(ArgumentError, match=sentence):
            layers[:2](states)
    good = torch.zeros(2, 8, width)
    with pytest.raises(ArgumentError, match="attention_mask"):
        layers(good, MASK[:, :7])
    with pytest.raises(ArgumentError, match="no row"):
        layers(good, 0 * MASK)
    with (
        layers.inference_session(max_length=9, batch_size=2) as session,
        pytest.raises(UnsupportedArgumentError, match="gradients"),
    ):
        session.step(good.clone().requires_grad_())
    with layers.inference_session(max_length=9, batch_size=2) as session:
        with pytest.raises(
            UnsupportedArgumentError, match=r"^prompts: .* layers\(hidden, prompts="
        ):
            session.step(good, torch.zeros(8, 2, width))
        with pytest.raises(UnsupportedArgumentError, match=r"^hypo_ids: rows are not reordered"):
            session.step(good, None, torch.tensor([1, 0]))
        assert session.step(good, None, None).shape == good.shape
    with pytest.raises(ArgumentError, match="step of 2"):
        layers[::2]
    with pytest.raises(ArgumentError, match="has no block"):
        layers[2:2]
    with pytest.raises(IndexError):
        layers[8]
    with pytest.raises(SessionLengthError, match="max_length: 1000000 is too many"):
        layers.inference_session(max_length=10**6)
    with pytest.raises(NoCapacityError, match=r"^\d+ of 100 rows fit; no free KV for 500 pos"):
        layers.inference_session(max_length=500, batch_size=100)
