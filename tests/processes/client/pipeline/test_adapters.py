"""`adapter_name` of LMDeploy, and an adapter as the `model` of a pipeline, a client or an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models.adapters import generate_with, make_adapter
from support.processes.swarm import Running, local_settings, running_swarm

from modelswarm import Client, Engine, GenerationConfig, InferenceSession, pipeline
from modelswarm.errors import UserError

PROMPT = [5, 6, 7, 8]
LENGTH = 12
CONFIG = GenerationConfig(max_new_tokens=LENGTH)
NAMES = ("law", "tax")


@pytest.fixture(scope="module")
def adapters(
    toy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, Path | None]:
    """Return the folder of each adapter; None for the model without one."""
    folder = tmp_path_factory.mktemp("adapters")
    made = [
        make_adapter(toy_folder, folder / name, seed=len(name) + at)
        for at, name in enumerate(NAMES)
    ]
    return {None: None, **dict(zip(NAMES, made, strict=True))}


@pytest.fixture(scope="module")
def answers(
    toy_folder: Path, adapters: dict[str | None, Path | None]
) -> dict[str | None, list[int]]:
    """Return what peft generates with each adapter."""
    found = {
        name: generate_with(toy_folder, path, [PROMPT], LENGTH)[0][len(PROMPT) :]
        for name, path in adapters.items()
    }
    assert len(set(map(tuple, found.values()))) == len(found)
    return found


@pytest.fixture(scope="module")
def running(toy_folder: Path, adapters: dict[str | None, Path | None]) -> Iterator[Running]:
    listed = {name: path for name, path in adapters.items() if name and path}
    settings = local_settings("adapter-names")
    with running_swarm(
        toy_folder, "adapter-names", spans=2, settings=settings, adapters=listed
    ) as running:
        yield running


def test_pipeline_answers_with_the_adapter_of_each_call(
    running: Running, answers: dict[str | None, list[int]]
) -> None:
    with pipeline(f"http://{running.local.http}") as pipe:
        assert pipe.model.parent is None
        for name, tokens in answers.items():
            assert pipe(PROMPT, CONFIG, adapter_name=name).token_ids == tokens
            (streamed,) = pipe.stream_infer(
                PROMPT, CONFIG, adapter_name=name, stream_response=False
            )
            assert streamed.token_ids == tokens
        with pytest.raises(UserError, match="'civil' is not one of toy; allowed: 'law', 'tax'"):
            pipe(PROMPT, CONFIG, adapter_name="civil")


def test_chat_has_a_context_for_each_adapter(running: Running) -> None:
    url = f"http://{running.local.http}"
    with pipeline(url) as pipe, pipeline(url, model="law") as law:
        assert law.model.parent == pipe.model.name
        with pipe.session(CONFIG) as session, law.session(CONFIG) as other:
            for name, question in (("law", "One"), (None, "Two"), ("law", "Three")):
                pipe.chat(question, session, adapter_name=name)
            plain = pipe.infer(session.messages[:3], CONFIG)
            law.chat("One", other)
            assert session.history[0][1] == other.history[0][1]
            assert session.history[1][1] == plain.text
            assert {each.model for each in running.sessions()} == {"toy", "law"}
    running.wait_empty()


def test_adapter_is_the_model_of_client_and_engine(
    running: Running, answers: dict[str | None, list[int]]
) -> None:
    url = f"http://{running.local.http}"
    with Client(url) as client:
        answer = client.complete(
            PROMPT, model="tax", max_tokens=LENGTH, temperature=0, return_token_ids=True
        )
        assert list(answer.token_ids or ()) == answers["tax"]
    with Engine(url, model="tax") as engine, InferenceSession(engine, max_length=40) as session:
        assert engine.model == "tax"
        assert session.prefill(PROMPT).argmax().item() == answers["tax"][0]


@pytest.mark.full
def test_private_swarm_has_the_adapters_it_is_given(
    toy_folder: Path,
    adapters: dict[str | None, Path | None],
    answers: dict[str | None, list[int]],
    tmp_path: Path,
) -> None:
    model = str(toy_folder)
    given = {"law": str(adapters["law"])}
    with pipeline(model, adapters=given, session_len=64, threads=1) as pipe:
        assert pipe(PROMPT, CONFIG, adapter_name="law").token_ids == answers["law"]
        assert pipe(PROMPT, CONFIG).token_ids == answers[None]
    wide = make_adapter(toy_folder, tmp_path, rank=20)
    with pipeline(
        model,
        adapters={"wide": str(wide)},
        model="wide",
        max_lora_rank=20,
        session_len=64,
        threads=1,
    ) as pipe:
        (right,) = generate_with(toy_folder, wide, [PROMPT], LENGTH)
        assert pipe(PROMPT, CONFIG).token_ids == right[len(PROMPT) :]
