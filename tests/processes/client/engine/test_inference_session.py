"""`InferenceSession`: logits of contexts that are stepped by hand equal those of transformers' model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.models.tiny_models import TOY_LENGTH, VOCAB
from support.processes.swarm import Running
from torch import Tensor

from modelswarm import Engine, InferenceSession
from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.sessions.errors import (
    NoCapacityError,
    SessionBusyError,
    SessionClosedError,
    SessionLengthError,
)
from modelswarm.errors import UserError
from modelswarm.protocol.wire import api_pb2

PROMPT = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100]])
PADDED = torch.tensor([[0, 0, 0, 65, 12, 200], [90, 91, 92, 93, 94, 95], [0, 0, 0, 0, 0, 44]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])


def logits_behind(model: Any, rows: list[list[int]]) -> Tensor:
    """Return transformers' logits [batch, vocabulary] behind the last token of each row."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits[:, -1] for row in rows])


def plain_rows() -> list[list[int]]:
    """Return the tokens of each padded row."""
    return [row[keep].tolist() for row, keep in zip(PADDED, MASK.bool(), strict=True)]


def same(ours: Tensor, whole: Tensor) -> bool:
    return ours.shape == whole.shape and torch.allclose(ours, whole, atol=1e-3)


def test_prefill_and_steps_equal_transformers(engine: Engine, toy_model: Any) -> None:
    with torch.no_grad():
        whole = toy_model(PROMPT).logits
    with InferenceSession(engine, max_length=20) as session:
        assert same(session.prefill(PROMPT), whole[:, -1])
        assert same(session.prefill(PROMPT, all_positions=True), whole)
        assert same(session.prefill(PROMPT[0, :3].tolist()), whole[:, 2])
        for place in range(3, 8):
            logits = session.decode_step(PROMPT[0, place])
            assert same(logits, whole[:, place])
        assert session.tokens == PROMPT.tolist()
        assert session.position == 8
        assert logits.dtype == torch.float32


def test_greedy_steps_equal_transformers_generate(engine: Engine, toy_model: Any) -> None:
    wanted = toy_model.generate(PROMPT, do_sample=False, max_new_tokens=12, eos_token_id=None)
    with InferenceSession(engine, max_length=20) as session:
        logits = session.prefill(PROMPT)
        for _ in range(11):
            logits = session.decode_step(logits.argmax())
        assert [*session.tokens[0], int(logits.argmax())] == wanted[0].tolist()


def test_padded_batch_equals_transformers(engine: Engine, toy_model: Any) -> None:
    rows = plain_rows()
    with InferenceSession(engine, max_length=16, batch_size=3) as session:
        logits = session.prefill_batch(PADDED, MASK)
        assert same(logits, logits_behind(toy_model, rows))
        for number in range(4):
            tokens = logits.argmax(-1) if number % 2 else logits.argmax(-1, keepdim=True)
            rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
            logits = session.decode_step_batch(tokens)
            assert same(logits, logits_behind(toy_model, rows))
        assert session.tokens == rows
        assert session.position == 10
        again = session.prefill_batch(PADDED, MASK.bool(), truncate_to=2)
        assert same(again, logits_behind(toy_model, [row[-2:] for row in plain_rows()]))


def test_prompt_is_truncated_to_its_last_tokens(engine: Engine, toy_model: Any) -> None:
    with InferenceSession(engine, max_length=6) as session:
        logits = session.prefill(PROMPT, truncate_to=5)
        assert session.tokens == [PROMPT[0, -5:].tolist()]
        assert same(logits, logits_behind(toy_model, session.tokens))


@pytest.mark.parametrize(
    ("ids", "field", "part"),
    [
        (torch.tensor([[1.5]]), "input_ids", "float32"),
        (torch.tensor([[True]]), "input_ids", "bool"),
        (torch.tensor([1, 2]), "input_ids", r"\[2\]"),
        (torch.zeros(1, 0, dtype=torch.int64), "input_ids", "at least 1"),
        (torch.tensor([[1], [2]]), "input_ids", "prefill_batch"),
        (torch.tensor([[VOCAB]]), "input_ids", f"0 to {VOCAB - 1}"),
        (torch.tensor([[-1]]), "input_ids", "-1"),
        ([], "input_ids", "at least 1"),
        (["a"], "input_ids", "integers"),
        ([[5, 6]], "input_ids", r"the shape is \[1, ...\]; .*prefill_batch"),
        (5, "input_ids", "integers"),
        ([1 << 70], "input_ids", "integers"),
    ],
    ids=lambda value: "",
)
def test_bad_prompt_is_refused(engine: Engine, ids: Any, field: str, part: str) -> None:
    with InferenceSession(engine, max_length=8) as session:
        with pytest.raises(ArgumentError, match=part) as caught:
            session.prefill(ids)
        assert caught.value.field == field
        assert session.tokens == []
        assert session.prefill([5]).shape == (1, VOCAB)


def test_bad_step_is_refused(engine: Engine) -> None:
    with InferenceSession(engine, max_length=8) as session:
        with pytest.raises(ArgumentError, match="begin with prefill"):
            session.decode_step(5)
        session.prefill([5])
        steps: list[tuple[Any, str]] = [
            (1.5, "allowed: one integer"),
            (VOCAB, f"0 to {VOCAB - 1}"),
            ("a", "allowed: one integer"),
            ([5], "allowed: one integer"),
        ]
        for token, part in steps:
            with pytest.raises(ArgumentError, match=part):
                session.decode_step(token)
        batches: list[tuple[Any, str]] = [([1, 2], "each row"), (torch.tensor([0.5]), "float")]
        for tokens, part in batches:
            with pytest.raises(ArgumentError, match=part):
                session.decode_step_batch(tokens)
        assert session.tokens == [[5]]


def test_bad_batch_is_refused(engine: Engine) -> None:
    with InferenceSession(engine, max_length=8, batch_size=3) as session:
        masks: list[tuple[Any, str]] = [
            (None, "several rows need one"),
            (MASK[:, :3], "shape"),
            (MASK * 2, "allowed values"),
            (MASK.flip(1), "padded on the left"),
            ([[1]], "a list"),
        ]
        for mask, part in masks:
            with pytest.raises(ArgumentError, match=part) as caught:
                session.prefill_batch(PADDED, mask)
            assert caught.value.field == "attention_mask"
        with pytest.raises(ArgumentError, match="opened for 3"):
            session.prefill_batch(PADDED[:2], MASK[:2])
        with pytest.raises(ArgumentError, match="truncate_to"):
            session.prefill_batch(PADDED, MASK, truncate_to=0)
        session.prefill_batch(PADDED, MASK)
        with pytest.raises(ArgumentError, match="decode_step_batch"):
            session.decode_step(1)


def test_positions_beyond_max_length_are_refused(engine: Engine) -> None:
    with InferenceSession(engine, max_length=7) as session:
        with pytest.raises(SessionLengthError, match="exceeded: 8 tokens, and it is 7"):
            session.prefill(PROMPT)
        session.prefill(PROMPT[:, :6])
        session.decode_step(8)
        with pytest.raises(SessionLengthError):
            session.decode_step(100)
        assert session.position == 7
        assert session.prefill(PROMPT[:, :7], all_positions=True).shape == (1, 7, VOCAB)
    with pytest.raises(UserError, match="max_length"):
        InferenceSession(engine, max_length=TOY_LENGTH + 1)


def test_fork_goes_on_by_itself(engine: Engine, toy_model: Any) -> None:
    rows = plain_rows()
    with InferenceSession(engine, max_length=10, batch_size=3) as session:
        session.prefill_batch(PADDED, MASK)
        with session.fork() as fork:
            forked = fork.decode_step_batch([1, 2, 3])
            assert same(forked, logits_behind(toy_model, _with_step(rows, [1, 2, 3])))
            assert session.tokens == rows
            own = session.decode_step_batch([4, 5, 6])
            assert same(own, logits_behind(toy_model, _with_step(rows, [4, 5, 6])))
        session.decode_step_batch([7, 8, 9])
        with pytest.raises(SessionClosedError):
            fork.decode_step_batch([7, 8, 9])
    with pytest.raises(SessionClosedError):
        session.fork()


def _with_step(rows: list[list[int]], tokens: list[int]) -> list[list[int]]:
    return [[*row, token] for row, token in zip(rows, tokens, strict=True)]


def test_fork_is_closed_with_its_engine(four_spans: Running) -> None:
    with Engine(f"http://{four_spans.local.http}", gateway=four_spans.local.grpc) as engine:
        fork = InferenceSession(engine, max_length=10).fork()
        fork.prefill([5])
    with pytest.raises(SessionClosedError):
        fork.decode_step(6)


def test_closed_session_is_refused(engine: Engine, four_spans: Running) -> None:
    session = InferenceSession(engine, max_length=8)
    session.prefill([5])
    session.close()
    session.close()
    with pytest.raises(SessionClosedError):
        session.decode_step(5)
    with Engine(f"http://{four_spans.local.http}", gateway=four_spans.local.grpc) as other:
        session = InferenceSession(other)
        assert session.max_length == other.max_length == TOY_LENGTH
    with pytest.raises(SessionClosedError):
        session.prefill([5])
    with pytest.raises(UserError, match="closed"):
        InferenceSession(other)


def test_second_thread_is_refused(engine: Engine) -> None:
    refused: list[BaseException] = []
    with InferenceSession(engine, max_length=300) as session:
        session.prefill([5])

        def use() -> None:
            try:
                session.decode_step(6)
            except SessionBusyError as error:
                refused.append(error)

        with session._session.turn():
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
        assert len(refused) == 1
        session.decode_step(6)
        assert session.tokens == [[5, 6]]


def test_rows_without_room_are_refused_at_once(engine: Engine) -> None:
    with pytest.raises(NoCapacityError), InferenceSession(engine, batch_size=1000):
        pass


@pytest.mark.parametrize("kills", [(3,), pytest.param((5, 15, 25), marks=pytest.mark.full)])
def test_killed_servers_change_no_logits(
    engine: Engine, four_spans: Running, toy_model: Any, kills: tuple[int, ...]
) -> None:
    rows, before = plain_rows(), {each.id for each in four_spans.sessions()}

    def is_new(each: api_pb2.Session) -> bool:
        return each.id not in before

    with InferenceSession(engine, max_length=60, batch_size=3) as session:
        logits = session.prefill_batch(PADDED, MASK)
        for number in range(kills[-1] + 5):
            if number in kills:
                four_spans.wait_whole()
                row = four_spans.wait_session(is_new)
                four_spans.kill(row.route[number // 10].peer)
            assert same(logits, logits_behind(toy_model, rows))
            tokens = logits.argmax(-1)
            rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
            logits = session.decode_step_batch(tokens)
        assert session.tokens == rows
    four_spans.wait_whole()
