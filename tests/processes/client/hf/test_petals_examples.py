"""Petals' two documented examples of sessions, word for word but for the import and the model's name.

The answers are sampled, so each turn is compared with the servers' sampler on the whole model's logits of the whole
context. The seeds are those that `generate` draws from torch's generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.sampling.sampled import check_sampled, next_seeds
from support.models.tiny_models import EOS, load_whole, make_model
from support.processes.swarm import Running, local_settings, running_swarm

from modelswarm.protocol.messages import Sampling

EXAMPLES = Path(__file__).with_name("petals_examples.md").read_text(encoding="utf-8")
IMPORT = "from petals.models.bloom.model import DistributedBloomForCausalLM"
NAME = "bigscience/bloom-7b1-petals"
CHATBOT, REPL = (part.split("```")[0] for part in EXAMPLES.split("```python\n")[1:])


@pytest.fixture(scope="module")
def bloom_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("bloom"), "bloom", vocab=257, max_position_embeddings=4096
    )


@pytest.fixture(scope="module")
def bloom(bloom_folder: Path) -> Iterator[Running]:
    settings = local_settings("bloom")
    with running_swarm(
        bloom_folder, "bloom", spans=2, replicas=2, sessions=2, length=4096, settings=settings
    ) as running:
        yield running


@pytest.fixture
def names(bloom: Running, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of a script, whose gateway is that of the environment."""
    monkeypatch.setenv("MODELSWARM_GATEWAY", bloom.local.grpc)
    return {}


def run(example: str, folder: Path, names: dict[str, Any]) -> None:
    script = example.replace(IMPORT, "from modelswarm import DistributedBloomForCausalLM")
    exec(compile(script.replace(NAME, str(folder)), "example", "exec"), names)


def test_examples_are_those_of_petals() -> None:
    """The digest is that of the page as it was published; a formatter once put a space into it."""
    digest = hashlib.sha256(EXAMPLES.encode()).hexdigest()
    assert digest == "65e3068b01dc273b577dc3a59cfe63352b1e2ce1aa3bfedd6f8104454a0580dc"
    assert IMPORT in CHATBOT
    assert CHATBOT.count(NAME) == 1
    assert "model.generate(\n        inputs2,\n        session=session," in CHATBOT
    assert REPL.startswith('conversation = ""\nwith model.inference_session(max_length=4096)')


def test_chatbot_answers_as_the_whole_model(bloom_folder: Path, names: dict[str, Any]) -> None:
    torch.manual_seed(11)
    run(CHATBOT, bloom_folder, names)
    whole = load_whole(bloom_folder)
    torch.manual_seed(11)
    for turn, top_p in (("", 0.9), ("2", 1.0)):
        inputs, outputs = names[f"inputs{turn}"][0].tolist(), names[f"outputs{turn}"][0].tolist()
        assert outputs[: len(inputs)] == inputs
        assert len(inputs) < len(outputs) <= len(inputs) + 100
        sampling = Sampling(
            temperature=0.8, top_k=50, seed=next_seeds(1)[0], eos=(EOS,), top_p=top_p
        )
        check_sampled(whole, outputs, len(inputs), sampling)
    assert names["session"].tokens == [outputs], "the second turn is the whole context"


@pytest.mark.full
def test_repl_answers_as_the_whole_model(
    bloom: Running, bloom_folder: Path, names: dict[str, Any]
) -> None:
    """A server is killed before the last question."""
    from transformers import AutoTokenizer

    from modelswarm import DistributedBloomForCausalLM

    model = DistributedBloomForCausalLM.from_pretrained(bloom_folder)
    questions = ["Hi", "And you?", "Why?", "quit"]
    asked: list[str] = []
    turns: list[tuple[list[int], list[int]]] = []
    contexts: list[list[int]] = []

    def ask(prompt: str) -> str:
        assert prompt == "You: "
        if asked:
            turns.append((names["inputs"][0].tolist(), names["outputs"][0].tolist()))
            contexts.append(names["session"].tokens[0])
        if len(asked) == 2:
            bloom.kill(bloom.only_session().route[0].peer)
        asked.append(questions[len(asked)])
        return asked[-1]

    names |= {
        "model": model,
        "tokenizer": AutoTokenizer.from_pretrained(bloom_folder),
        "torch": torch,
        "input": ask,
    }
    torch.manual_seed(12)
    run(REPL, bloom_folder, names)
    assert asked == questions
    whole = load_whole(bloom_folder)
    torch.manual_seed(12)
    for (inputs, outputs), context in zip(turns, contexts, strict=True):
        assert outputs[: len(inputs)] == inputs
        assert outputs == context, "the session holds this transcript, and no other one"
        sampling = Sampling(
            temperature=0.7, top_k=50, repetition_penalty=1.2, seed=next_seeds(1)[0], eos=(EOS,)
        )
        check_sampled(whole, outputs, len(inputs), sampling)
    bloom.wait_whole()
