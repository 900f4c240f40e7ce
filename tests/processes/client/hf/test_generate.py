"""`generate` of a model on a swarm equals transformers' own on the whole model."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.sampling.sampled import check_sampled, check_sampled_near, next_seeds
from support.processes.swarm import Running
from transformers import (
    AsyncTextIteratorStreamer,
    AutoTokenizer,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from typing_extensions import override

from modelswarm.protocol.messages import Sampling

PROMPTS = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100], [90, 91, 92, 93, 94, 95, 96, 97]])
ENDLESS: dict[str, Any] = {"eos_token_id": None}
EVEN = [token for token in range(320) if token % 2 == 0]


class AfterSeven(StoppingCriteria):
    """Ends a row at its first multiple of 7."""

    @override
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] % 7 == 0


def greedy(model: Any, ids: Any = PROMPTS, count: int = 30, **wanted: Any) -> Any:
    return model.generate(ids, max_new_tokens=count, do_sample=False, **wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        ENDLESS,
        ENDLESS | {"repetition_penalty": 1.4},
        pytest.param(ENDLESS | {"repetition_penalty": 0.7}, marks=pytest.mark.full),
        pytest.param(ENDLESS | {"no_repeat_ngram_size": 2}, marks=pytest.mark.full),
        ENDLESS | {"suppress_tokens": EVEN},
        ENDLESS | {"bad_words_ids": [[token] for token in EVEN[:100]]},
        ENDLESS | {"bad_words_ids": [[90, 229], [12]]},
        ENDLESS | {"sequence_bias": [[[25], 9.0], [[301], -4.5]]},
        pytest.param(ENDLESS | {"renormalize_logits": True}, marks=pytest.mark.full),
        {"eos_token_id": EVEN, "min_new_tokens": 7},
        {"eos_token_id": EVEN, "min_length": 12},
        pytest.param({"eos_token_id": EVEN}, marks=pytest.mark.full),
        {"eos_token_id": EVEN, "pad_token_id": 3},
        {"eos_token_id": [5, 9], "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    ],
    ids=lambda wanted: "-".join(str(name) for name in wanted),
)
def test_greedy_equals_transformers(model: Any, toy_model: Any, wanted: dict[str, Any]) -> None:
    for ids in (PROMPTS[:1], PROMPTS):
        assert torch.equal(greedy(model, ids, **wanted), greedy(toy_model, ids, **wanted))


def test_length_and_defaults_equal_transformers(model: Any, toy_model: Any) -> None:
    ids = PROMPTS[:1]
    for wanted in ({"max_length": 20}, {"max_new_tokens": 1}):
        assert torch.equal(model.generate(ids, **wanted), toy_model.generate(ids, **wanted))
    for each in (model, toy_model):
        with pytest.warns(UserWarning, match="max_length"):
            assert each.generate(ids, **ENDLESS).shape == (1, 28), "transformers' default"
    with pytest.raises(ValueError, match="max_length"):
        model.generate(ids, max_length=5)


def test_left_padded_batch_equals_each_row_alone(model: Any, toy_model: Any) -> None:
    ids = torch.tensor([[0, 0, 0, 65, 12, 200], [90, 91, 92, 93, 94, 95], [0, 0, 0, 0, 0, 7]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6, [0, 0, 0, 0, 0, 1]])
    wanted: dict[str, Any] = {"attention_mask": mask, "repetition_penalty": 1.3, **ENDLESS}
    ours = greedy(model, ids, **wanted)
    assert torch.equal(ours, greedy(toy_model, ids, **wanted))
    for row, begin in ((0, 3), (2, 5)):
        alone = greedy(model, ids[row : row + 1, begin:], repetition_penalty=1.3, **ENDLESS)
        assert torch.equal(ours[row, begin:], alone[0])


def test_tokenizer_output_equals_transformers(model: Any, toy_model: Any, toy_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy_folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(["A cat sat", "On"], return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    wanted: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False}
    assert torch.equal(model.generate(**batch, **wanted), toy_model.generate(**batch, **wanted))


def test_mask_is_inferred_as_transformers_does(model: Any, toy_model: Any) -> None:
    ids = torch.tensor([[3, 3, 65, 12], [90, 91, 92, 93]])
    wanted: dict[str, Any] = {"pad_token_id": 3, "eos_token_id": [5]}
    assert torch.equal(greedy(model, ids, **wanted), greedy(toy_model, ids, **wanted))


def test_stop_strings_and_criteria_equal_transformers(
    model: Any, toy_model: Any, toy_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    whole = greedy(toy_model, PROMPTS[:1], 60, **ENDLESS)
    text = next(
        found
        for end in range(20, 60)
        if len(found := tokenizer.decode(whole[0, end : end + 2])) == 2 and "\ufffd" not in found
    )
    for ids in (PROMPTS[:1], PROMPTS):
        wanted: dict[str, Any] = {"stop_strings": [text], "tokenizer": tokenizer, **ENDLESS}
        stopped = greedy(model, ids, 60, **wanted)
        assert torch.equal(stopped, greedy(toy_model, ids, 60, **wanted))
        wanted = {"stopping_criteria": [AfterSeven()], **ENDLESS}
        stopped = greedy(model, ids, 60, **wanted)
        assert torch.equal(stopped, greedy(toy_model, ids, 60, **wanted))
        assert stopped.shape[1] < 68


def test_max_time_ends_the_answer(model: Any) -> None:
    out = greedy(model, PROMPTS[:1], 900, max_time=0.2, **ENDLESS)
    assert 8 < out.shape[1] < 908


@pytest.mark.parametrize(
    ("wanted", "sampling"),
    [
        ({"top_k": 0}, {}),
        ({"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}),
        ({"top_k": 7, "min_p": 0.02}, {"top_k": 7, "min_p": 0.02}),
        (
            {"top_k": 0, "temperature": 1.5, "repetition_penalty": 1.2},
            {"temperature": 1.5, "repetition_penalty": 1.2},
        ),
        ({"top_k": 9, "no_repeat_ngram_size": 1}, {"top_k": 9, "no_repeat_ngram_size": 1}),
        pytest.param({"top_k": 0, "typical_p": 0.5}, {"typical_p": 0.5}, marks=pytest.mark.full),
        (
            {"top_k": 0, "typical_p": 0.9, "temperature": 0.8},
            {"typical_p": 0.9, "temperature": 0.8},
        ),
    ],
    ids=range(7),
)
def test_sampled_rows_are_those_of_the_sampler(
    model: Any, toy_model: Any, wanted: dict[str, Any], sampling: dict[str, Any]
) -> None:
    arguments = {"do_sample": True, "max_new_tokens": 25, "num_return_sequences": 2, **ENDLESS}
    torch.manual_seed(5)
    out = model.generate(PROMPTS, **arguments, **wanted)
    assert out.shape == (4, 33)
    assert torch.equal(out[:, :8], PROMPTS.repeat_interleave(2, dim=0))
    assert not torch.equal(out[0], out[1])
    torch.manual_seed(5)
    for row, seed in zip(out.tolist(), next_seeds(4), strict=True):
        parameters = Sampling(**{"temperature": 1.0, "seed": seed, **sampling})
        check = check_sampled if parameters.typical_p == 1.0 else check_sampled_near
        check(toy_model, row, 8, parameters)
    torch.manual_seed(5)
    assert torch.equal(out, model.generate(PROMPTS, **arguments, **wanted))


def test_streamers_get_the_prompt_and_each_token(
    model: Any, toy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    wanted: dict[str, Any] = {"suppress_tokens": list(range(200, 320)), **ENDLESS}
    out = greedy(model, PROMPTS[:1], 20, **wanted)
    streamed = greedy(model, PROMPTS[:1], 20, streamer=TextStreamer(tokenizer), **wanted)
    assert torch.equal(out, streamed)
    assert capsys.readouterr().out == f"{tokenizer.decode(out[0])}\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(
        target=greedy, args=(model, PROMPTS[:1], 20), kwargs={"streamer": streamer, **wanted}
    )
    thread.start()
    assert "".join(streamer) == tokenizer.decode(out[0, 8:])
    thread.join()


def test_async_streamer_gets_each_token(model: Any, toy_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    wanted: dict[str, Any] = {"suppress_tokens": list(range(200, 320)), **ENDLESS}
    out = greedy(model, PROMPTS[:1], 20, **wanted)

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
        run = asyncio.to_thread(greedy, model, PROMPTS[:1], 20, streamer=streamer, **wanted)
        task = asyncio.create_task(run)
        text = "".join([part async for part in streamer])
        assert torch.equal(await task, out)
        return text

    assert asyncio.run(read()) == tokenizer.decode(out[0, 8:])


def test_dictionary_has_the_sequences(model: Any) -> None:
    plain = greedy(model, PROMPTS, **ENDLESS)
    made = greedy(model, PROMPTS, return_dict_in_generate=True, **ENDLESS)
    assert torch.equal(made.sequences, plain)
    assert made.scores is None


@pytest.mark.full
def test_more_rows_than_room_run_in_turns(model: Any, toy_model: Any) -> None:
    """The swarm has room for a dozen sessions of the whole context."""
    ids = torch.randint(1, 257, (20, 900), generator=torch.Generator().manual_seed(1))
    ours = greedy(model, ids, 4, **ENDLESS)
    assert torch.equal(ours, greedy(toy_model, ids, 4, **ENDLESS))


@pytest.mark.full
def test_killed_servers_change_no_token(toy_swarm: Running, model: Any, toy_model: Any) -> None:
    """One server is killed per 200 tokens."""
    toy_swarm.wait_whole()
    before = toy_swarm.faults()

    class Killer:
        """Kills a server of the running session."""

        tokens = 0

        def put(self, value: Any) -> None:
            self.tokens += 1
            if self.tokens % 200 == 2:
                session = toy_swarm.wait_session(lambda each: each.state == "running")
                toy_swarm.kill(session.route[self.tokens // 200 % 2].peer)

        def end(self) -> None:
            toy_swarm.wait_whole()

    wanted: dict[str, Any] = {"repetition_penalty": 1.1, **ENDLESS}
    ours = greedy(model, PROMPTS[:1], 600, streamer=Killer(), **wanted)
    assert torch.equal(ours, greedy(toy_model, PROMPTS[:1], 600, **wanted))
    assert toy_swarm.faults().reroutes >= before.reroutes + 3
