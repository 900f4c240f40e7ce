"""`model.inference_session`: several calls of `generate` continue one context."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from support.eventually import eventually
from support.models.sampling.sampled import check_sampled, next_seeds
from support.processes.swarm import Running
from typing_extensions import override

from modelswarm.client.sessions.errors import (
    NoCapacityError,
    SessionBusyError,
    SessionClosedError,
    SessionLengthError,
)
from modelswarm.client.sessions.session import GatewaySession
from modelswarm.errors import UserError
from modelswarm.placement.plan import PAGE_SIZE
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.messages import Sampling

PROMPTS = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100], [90, 91, 92, 93, 94, 95, 96, 97]])
MORE = torch.tensor([[41, 42, 43]])
ENDLESS: dict[str, Any] = {"eos_token_id": None, "do_sample": False}


def generate(model: Any, ids: Any, count: int = 10, **wanted: Any) -> Any:
    return model.generate(ids, max_new_tokens=count, **{**ENDLESS, **wanted})


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("is_explicit", [True, False])
def test_many_calls_equal_one(model: Any, toy_model: Any, batch: int, is_explicit: bool) -> None:
    """Petals' test_greedy_generation: one call, and 1 + (n - 2) + 1 calls in one session."""
    ids = PROMPTS[:batch]
    whole = generate(toy_model, ids, 12)
    with model.inference_session(max_length=40, batch_size=batch) as session:
        chosen = {"session": session} if is_explicit else {}
        out = generate(model, ids, 1, **chosen)
        for count in (10, 1):
            out = torch.cat([out, generate(model, None, count, **chosen)], dim=1)
        assert session.position == 20
        assert session.tokens == whole.tolist()
    assert torch.equal(out, whole)
    assert model.active_session is None


def test_many_sampled_calls_equal_one(model: Any, toy_model: Any) -> None:
    """Petals' test_sampling: penalties see the whole context of the session."""
    wanted = {"do_sample": True, "top_k": 40, "repetition_penalty": 1.3}
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.3}
    torch.manual_seed(3)
    with model.inference_session(max_length=60) as session:
        ends = [8, *(end for count in (1, 10, 5) for end in [count])]
        generate(model, PROMPTS[:1], ends[1], **wanted)
        for count in ends[2:]:
            generate(model, None, count, **wanted)
        log = session.tokens[0]
    torch.manual_seed(3)
    begin = 8
    for count in ends[1:]:
        (seed,) = next_seeds(1)
        part = log[: begin + count]
        check_sampled(toy_model, part, begin, Sampling(seed=seed, **sampling))
        begin += count


def test_appended_and_repeated_inputs_are_told_apart(model: Any, toy_model: Any) -> None:
    with model.inference_session(max_length=100) as session:
        first = generate(model, PROMPTS[:1])
        second = generate(model, MORE)
        context = torch.cat([first, MORE], dim=1)
        assert torch.equal(second[:, :3], MORE), "the output is this turn's input, and the answer"
        assert torch.equal(second[:, 3:], generate(toy_model, context)[:, 21:])
        transcript = torch.cat([context, second[:, 3:8], MORE], dim=1)
        third = generate(model, transcript)
        assert torch.equal(third, generate(toy_model, transcript))
        assert session.position == transcript.shape[1] + 10
        short = transcript[:, :-4]
        fourth = generate(model, short)
        assert torch.equal(fourth[:, : short.shape[1]], short)
        assert session.position == transcript.shape[1] + 10 + short.shape[1] + 10, "appended"


def test_transcript_of_the_last_prompt_alone_generates_anew(model: Any, toy_model: Any) -> None:
    with model.inference_session(max_length=100) as session:
        first = generate(model, PROMPTS[:1])
        again = generate(model, PROMPTS[:1])
        assert torch.equal(first, again)
        assert session.position == 18
        generate(model, None, 5)
        other = torch.cat([first[:, :12], MORE], dim=1)
        assert torch.equal(generate(model, other), generate(toy_model, other)), "also after None"
        assert session.position == 25


@pytest.mark.parametrize(("inputs", "position"), [("append", 36), ("transcript", 18)])
def test_input_rule_can_be_fixed(model: Any, toy_model: Any, inputs: str, position: int) -> None:
    with model.inference_session(max_length=100, inputs=inputs) as session:
        first = generate(model, PROMPTS[:1])
        second = generate(model, PROMPTS[:1])
        assert session.position == position
        context = torch.cat([first, PROMPTS[:1]], dim=1) if position > 18 else PROMPTS[:1]
        assert torch.equal(second[:, 8:], generate(toy_model, context)[:, -10:])
    with model.inference_session(max_length=100, inputs="transcript") as session:
        generate(model, PROMPTS[:1])
        assert torch.equal(generate(model, MORE), generate(toy_model, MORE))
        assert session.position == 13


def test_rewound_session_equals_a_clean_run(model: Any, toy_model: Any) -> None:
    """Petals' test_remote_block_with_cache_invalidation_exact_match, by tokens."""
    with model.inference_session(max_length=60) as session:
        first = generate(model, PROMPTS[:1])
        session.position = 5
        second = generate(model, MORE)
        context = torch.cat([first[:, :5], MORE], dim=1)
        assert torch.equal(second[:, 3:], generate(toy_model, context)[:, 8:])
        for wrong in (19, -1, True, 2.0, "1"):
            with pytest.raises(UserError, match="0 to 18"):
                session.position = wrong


def test_fork_goes_on_beside_its_parent(model: Any, toy_model: Any) -> None:
    with model.inference_session(max_length=60, batch_size=2) as session:
        first = generate(model, PROMPTS)
        with session.fork() as branch:
            assert model.active_session is branch
            assert branch.tokens == session.tokens == first.tolist()
            assert branch.position == 18
            more = generate(model, MORE.repeat(2, 1))
        assert model.active_session is session
        assert session.position == 18, "closing the fork leaves its parent"
        context = torch.cat([first, MORE.repeat(2, 1)], dim=1)
        mask = torch.ones_like(context)  # else 0 counts as padding
        whole = generate(toy_model, context, attention_mask=mask)
        assert torch.equal(more[:, 3:], whole[:, 21:])
        other = session.fork()
        transcript = generate(model, first[:, :12])
        assert torch.equal(transcript, generate(toy_model, first[:, :12])), "as before the fork"
    with other:
        whole = generate(toy_model, first, attention_mask=torch.ones_like(first))
        assert torch.equal(generate(model, None), whole[:, 18:])
    with pytest.raises(SessionClosedError):
        other.fork()


def test_rows_of_different_length_continue_side_by_side(model: Any, toy_model: Any) -> None:
    ids = torch.tensor([[0, 0, 65, 12], [90, 91, 92, 93]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    more = torch.tensor([[41, 42, 43], [0, 0, 44]])
    more_mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    with model.inference_session(max_length=60) as session:
        generate(model, ids, 6, attention_mask=mask)
        out = generate(model, more, 6, attention_mask=more_mask)
        logs = session.tokens
    assert torch.equal(out[:, :3], more)
    for row, (begin, end) in enumerate(((2, 11), (4, 11))):
        first = generate(toy_model, ids[row : row + 1, 4 - begin :], 6)
        context = torch.cat([first, more[row : row + 1][:, more_mask[row].bool()]], dim=1)
        alone = generate(toy_model, context, 6)
        assert logs[row] == alone[0].tolist()
        assert context.shape[1] == end


def test_session_infers_the_mask_as_transformers_does(model: Any, toy_model: Any) -> None:
    ids = torch.tensor([[3, 3, 65, 12], [90, 91, 92, 93]])
    wanted: dict[str, Any] = {"pad_token_id": 3, "eos_token_id": [5]}
    with model.inference_session(max_length=40, batch_size=2) as session:
        assert torch.equal(generate(model, ids, **wanted), generate(toy_model, ids, **wanted))
        assert [log[:2] for log in session.tokens] == [[65, 12], [90, 91]]


def test_stopped_turn_keeps_what_was_returned(model: Any, toy_model: Any) -> None:
    from transformers import StoppingCriteria

    class AfterFive(StoppingCriteria):
        @override
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 13)

    with model.inference_session(max_length=900) as session:
        first = generate(model, PROMPTS[:1], 800, stopping_criteria=[AfterFive()])
        assert session.tokens == first.tolist()
        assert first.shape == (1, 13)
        more = generate(model, None, 30, stopping_criteria=[AfterFive()])
        assert more.shape == (1, 1)
        rest = generate(model, None, 40)
        whole = generate(toy_model, PROMPTS[:1], 46)
        assert torch.equal(torch.cat([first, more, rest], dim=1), whole)


def test_input_may_begin_with_the_last_end_token(model: Any, toy_model: Any) -> None:
    """Tokenizers whose bos is the end token begin each input with it."""
    end = int(generate(toy_model, PROMPTS[:1], 3)[0, -1])
    more = torch.tensor([[end, 41, 42]])
    with model.inference_session(max_length=100) as session:
        context = generate(model, PROMPTS[:1], eos_token_id=end, pad_token_id=0)
        assert context.shape[1] == 11
        for _ in range(2):
            context = torch.cat([context, more], dim=1)
            whole = generate(toy_model, context, 5)
            generate(model, more, 5)
            assert session.tokens == whole.tolist()
            context = whole
        assert session.rows[0].state().position == session.position


class Breaks:
    """A streamer that fails at a token."""

    def __init__(self, at: int) -> None:
        self.left = at

    def put(self, value: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the reader has gone")

    def end(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("wanted", [{}, {"prompt_lookup_num_tokens": 6}])
def test_failed_turn_leaves_no_token_in_the_session(
    model: Any, toy_model: Any, wanted: dict[str, Any]
) -> None:
    repeated = torch.cat([MORE, PROMPTS[:1, :5], MORE], dim=1)  # its drafts are wrong
    with model.inference_session(max_length=100) as session:
        first = generate(model, PROMPTS[:1])
        before = session.tokens
        for at in (1, 2, 3):
            with pytest.raises(RuntimeError, match="the reader has gone"):
                generate(model, repeated, streamer=Breaks(at), **wanted)
            assert session.tokens == before
        second = generate(model, repeated, **wanted)
        whole = generate(toy_model, torch.cat([first, repeated], dim=1))
        assert torch.equal(second, whole[:, first.shape[1] :])


def test_transcript_of_a_failed_turn_can_be_repeated(
    model: Any, toy_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NoCapacityError("no free KV", 1.0)

    with model.inference_session(max_length=100) as session:
        transcript = torch.cat([generate(model, PROMPTS[:1]), MORE], dim=1)
        with monkeypatch.context() as patch:
            patch.setattr(GatewaySession, "step", refuse)
            with pytest.raises(NoCapacityError):
                generate(model, transcript)
        again = generate(model, transcript)
        assert torch.equal(again, generate(toy_model, transcript))
        assert session.tokens == again.tolist()


def test_end_token_of_a_row_ends_only_that_row(model: Any, toy_model: Any) -> None:
    whole = generate(toy_model, PROMPTS, 12)
    end = int(whole[0, 10])
    wanted = {"eos_token_id": end, "pad_token_id": 3}
    with model.inference_session(max_length=60) as session:
        out = generate(model, PROMPTS, 12, **wanted)
        assert torch.equal(out, generate(toy_model, PROMPTS, 12, **wanted))
        assert session.tokens[0] == whole[0, :11].tolist()
        assert session.position == 20


def test_max_length_counts_the_whole_context(model: Any) -> None:
    with model.inference_session(max_length=40):
        generate(model, PROMPTS[:1], 10)
        out = model.generate(MORE, max_length=25, **ENDLESS)
        assert out.shape == (1, 7)


ROOM = (
    r"^\d+ of 100 rows fit; no free KV for 1000 positions on .*; at most \d+ fit now; close other"
)


def test_room_is_reserved_whole_and_freed(toy_swarm: Running, model: Any) -> None:
    with pytest.raises(NoCapacityError), ExitAll() as opened:
        for _ in range(100):
            opened.append(model.inference_session(max_length=1000))
    with pytest.raises(NoCapacityError, match=ROOM) as refused:
        model.inference_session(max_length=1000, batch_size=100)
    assert 3 <= int(str(refused.value).split()[0]) < 100
    with model.inference_session(max_length=1000, batch_size=3) as session:
        assert len(toy_swarm.sessions()) == len(session.rows) == 3
    with pytest.raises(RuntimeError), model.inference_session(max_length=1000):
        raise RuntimeError
    toy_swarm.wait_empty()
    assert not toy_swarm.sessions()


def test_nested_sessions_take_and_return_their_pages(toy_swarm: Running, model: Any) -> None:
    """Petals' test_server_info: free KV falls by exactly what max_length needs, and comes back."""
    needs: dict[str, int] = {}  # pages of each session, on each server of its route

    def are_exact(rows: int, pages: int) -> bool:
        """Return whether each server has lent exactly the pages of `rows` sessions; new ones need `pages` each."""
        sessions = toy_swarm.sessions()
        wanted: Counter[str] = Counter()
        for session in sessions:
            need = needs.setdefault(session.id, pages)
            wanted.update({name_of(hop.peer): need for hop in session.route})
        return len(sessions) == rows and toy_swarm.pages_in_use() == wanted

    toy_swarm.wait_whole()
    toy_swarm.wait_empty()
    with model.inference_session(max_length=6 * PAGE_SIZE):
        eventually("6 pages are used", lambda: are_exact(1, 6))
        with model.inference_session(max_length=18 * PAGE_SIZE + 1, batch_size=2) as inner:
            eventually("and 19 for each row", lambda: are_exact(3, 19))
            generate(model, PROMPTS)
            assert inner.position == 18
            assert are_exact(3, 0), "positions that are filled were reserved before"
        eventually("they are given back", lambda: are_exact(1, 0))
    toy_swarm.wait_empty()


class ExitAll(list[Any]):
    """Closes all its sessions."""

    def __enter__(self) -> ExitAll:
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self:
            each.close()


def test_too_long_turn_is_refused_before_it_is_sent(model: Any, toy_model: Any) -> None:
    with model.inference_session(max_length=30) as session:
        generate(model, PROMPTS[:1], 10)
        for ids, count in ((MORE, 10), (None, 13), (PROMPTS[:1], 23)):
            with pytest.raises(SessionLengthError, match="maximum length exceeded"):
                generate(model, ids, count)
        assert session.position == 18
        assert generate(model, None, 12).shape == (1, 12)


def test_closed_session_is_refused(model: Any) -> None:
    with model.inference_session(max_length=30) as session:
        pass
    session.close()
    with pytest.raises(SessionClosedError):
        generate(model, PROMPTS[:1], session=session)


def test_second_thread_in_a_session_is_refused(model: Any) -> None:
    errors: list[Exception] = []

    class Other:
        """Uses the session from another thread while it runs."""

        def put(self, value: Any) -> None:
            if not errors:
                thread = threading.Thread(target=self.use)
                thread.start()
                thread.join()

        def use(self) -> None:
            assert model.active_session is None, "sessions are active in their thread only"
            for call in (
                lambda: generate(model, MORE, session=session),
                lambda: setattr(session, "position", 0),
            ):
                try:
                    call()
                except SessionBusyError as error:
                    errors.append(error)

        def end(self) -> None:
            pass

    with model.inference_session(max_length=60) as session:
        generate(model, PROMPTS[:1], 20, streamer=Other())
        assert session.position == 28
    assert len(errors) == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_length": 0}, "max_length"),
        ({"max_length": "9"}, "max_length"),
        ({"max_length": 10**7}, "max_length"),
        ({"max_length": 9, "inputs": "all"}, "inputs"),
        ({"max_length": 9, "batch_size": 0}, "batch_size"),
        ({"max_length": 9, "ttl": 10**9}, "ttl"),
    ],
)
def test_wrong_session_is_refused_by_name(model: Any, options: Any, field: str) -> None:
    with pytest.raises(UserError) as refused:
        model.inference_session(**options)
    assert refused.value.field == field


def test_other_batch_is_refused(model: Any) -> None:
    with model.inference_session(max_length=40) as session:
        generate(model, PROMPTS[:1])
        with pytest.raises(UserError, match="2 rows"):
            generate(model, PROMPTS)
        for wanted in ({"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2}):
            with pytest.raises(UserError, match=next(iter(wanted))):
                generate(model, MORE, **wanted)
        assert session.position == 18
    with pytest.raises(UserError, match="session"):
        generate(model, MORE, session="mine")


def test_session_survives_killed_servers(toy_swarm: Running, model: Any, toy_model: Any) -> None:
    """One server per 200 tokens: between turns, and in a turn."""
    toy_swarm.wait_whole()
    toy_swarm.wait_empty()
    before = toy_swarm.faults()

    class Killer:
        """Kills the last server of the route at its fifth token."""

        def __init__(self) -> None:
            self.tokens = 0

        def put(self, value: Any) -> None:
            self.tokens += 1
            if self.tokens == 5:
                session = toy_swarm.wait_session(lambda each: each.state == "running")
                toy_swarm.kill(session.route[-1].peer)

        def end(self) -> None:
            pass

    with model.inference_session(max_length=900) as session:
        generate(model, PROMPTS[:1], 200)
        toy_swarm.kill(toy_swarm.only_session().route[0].peer)
        generate(model, None, 200)
        toy_swarm.wait_whole()
        generate(model, None, 200, streamer=Killer())
        assert session.tokens == generate(toy_model, PROMPTS[:1], 600).tolist()
    assert toy_swarm.faults().reroutes > before.reroutes
    toy_swarm.wait_whole()
