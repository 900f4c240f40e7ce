"""`Engine`: texts, streams and batches, of a running swarm and of a private one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.eventually import eventually
from support.models.tiny_models import TOY_LENGTH, VOCAB
from support.processes.swarm import Running

from modelswarm import Engine, InferenceSession
from modelswarm.client.api import ContextLengthError
from modelswarm.client.pipeline.response import Response
from modelswarm.errors import UserError

PROMPTS = ["Once upon a time", "The king", "A"]


def test_only_a_text_has_token_ids(engine: Engine) -> None:
    wrong: Any = 5
    with pytest.raises(UserError, match=r"^text: 5 is not allowed; allowed: a string$"):
        engine.encode(wrong)


def test_texts_equal_transformers(engine: Engine, toy_model: Any) -> None:
    for prompt in PROMPTS:
        ids = engine.encode(prompt)
        wanted = toy_model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)
        new = wanted[0, len(ids) :].tolist()
        text = engine.generate(prompt, max_new_tokens=12)
        assert text == engine.decode(new)
        assert text == engine.generate(ids, max_new_tokens=12)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"do_sample": True, "seed": 4, "top_k": 40, "temperature": 0.7},
    ],
    ids=["greedy", "drawn"],
)
def test_streams_equal_generate(engine: Engine, options: Any) -> None:
    options = options | {"max_new_tokens": 24}
    texts = engine.generate_batch(PROMPTS, stop_on_eos=False, **options)
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for pieces in engine.stream_generate_batch(PROMPTS, stop_on_eos=False, **options):
        streamed = [text + piece for text, piece in zip(streamed, pieces, strict=True)]
    assert streamed == texts
    pieces = list(engine.stream_generate(PROMPTS[0], stop_on_eos=False, **options))
    assert len(pieces) > 1
    assert "".join(pieces) == texts[0]
    assert engine.generate(PROMPTS[0], stop_on_eos=False, **options) == texts[0]


def test_batch_goes_on_from_the_answers_that_are_done(engine: Engine) -> None:
    kept = Response("kept", 1, 1, "stop")
    done = [None, kept, None]
    fresh = engine.generate_batch(PROMPTS, max_new_tokens=6)
    assert engine.generate_batch(PROMPTS, done=done, max_new_tokens=6) == [
        fresh[0],
        "kept",
        fresh[2],
    ]
    streamed = ["", "", ""]
    for pieces in engine.stream_generate_batch(PROMPTS, done=done, max_new_tokens=6):
        streamed = [text + piece for text, piece in zip(streamed, pieces, strict=True)]
    assert streamed == [fresh[0], "", fresh[2]]


def test_stream_that_is_left_ends_its_answer(engine: Engine, four_spans: Running) -> None:
    before = {each.id for each in four_spans.sessions()}
    stream = engine.stream_generate("A", max_new_tokens=1000, stop_on_eos=False)
    assert next(stream)
    stream.close()
    eventually(
        "the answer has ended",
        lambda: {each.id for each in four_spans.sessions()} <= before,
    )


def test_long_prompt_is_truncated_if_that_is_wanted(engine: Engine) -> None:
    ids = [1 + place % 200 for place in range(TOY_LENGTH + 100)]
    with pytest.raises(ContextLengthError):
        engine.generate(ids, max_new_tokens=8)
    text = engine.generate(ids, max_new_tokens=8, truncate_prompt=True, stop_on_eos=False)
    assert text == engine.generate(ids[108:], max_new_tokens=8, stop_on_eos=False)


@pytest.mark.parametrize(
    ("prompts", "options", "field"),
    [
        ("A", {}, "prompts"),
        ([5, 6], {}, "prompts[0]"),
        (["A", [1, VOCAB]], {}, "prompts[1]"),
        ([[-1]], {}, "prompts[0]"),
        ([[]], {}, "prompts[0]"),
        ([[True]], {}, "prompts[0]"),
        (["A"], {"max_new_tokens": 0}, "max_new_tokens"),
        (["A"], {"temperature": 0.5}, "temperature"),
        (["A"], {"do_sample": True, "temperature": 3.0}, "temperature"),
        (["A"], {"seed": 1.5}, "seed"),
        (["A"], {"stop_on_eos": 1}, "stop_on_eos"),
        (["A"], {"truncate_prompt": "yes"}, "truncate_prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_argument_is_refused(engine: Engine, prompts: Any, options: Any, field: str) -> None:
    for verb in (engine.generate_batch, engine.stream_generate_batch):
        with pytest.raises(UserError) as caught:
            verb(prompts, **options)
        assert caught.value.field == field


def test_unknown_option_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match=r"^top_q: there is no such option"):
        engine.generate("A", top_q=1)  # type: ignore[call-arg]
    with pytest.raises(UserError, match="gateway's URL"):
        Engine("demo://counting", gateway="127.0.0.1:8001")


def test_no_prompts_get_no_answers(engine: Engine) -> None:
    assert engine.generate_batch([]) == []
    assert list(engine.stream_generate_batch([])) == []


@pytest.mark.full
def test_killed_server_changes_no_text(engine: Engine, four_spans: Running) -> None:
    whole = engine.generate("A", max_new_tokens=600, stop_on_eos=False)
    four_spans.wait_whole()
    pieces = []
    for place, piece in enumerate(
        engine.stream_generate("A", max_new_tokens=600, stop_on_eos=False)
    ):
        pieces.append(piece)
        if place == 20:
            running = four_spans.wait_session(lambda each: each.state == "running")
            four_spans.kill(running.route[1].peer)
    assert "".join(pieces) == whole
    four_spans.wait_whole()


@pytest.mark.full
def test_engine_of_a_folder_runs_a_private_swarm(toy_folder: Path, toy_model: Any) -> None:
    with Engine(str(toy_folder), spans=2, session_len=64, threads=1) as engine:
        assert (engine.max_length, engine.vocab_size) == (64, VOCAB)
        text = engine.generate("A", max_new_tokens=8, stop_on_eos=False)
        with InferenceSession(engine) as session:
            tokens = []
            logits = session.prefill(engine.encode("A"))
            for _ in range(8):
                tokens.append(int(logits.argmax()))
                logits = session.decode_step(tokens[-1])
        assert engine.decode(tokens) == text
