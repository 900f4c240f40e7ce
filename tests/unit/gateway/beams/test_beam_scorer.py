"""The scorer of beam search gives the answers and scores of transformers' `generate`, for random small models."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.backend.beams.scorer import BeamScorer, ScoredToken, tokens_per_beam
from modelswarm_gateway.core.interface.turn import TokenLogprobs

PROMPT = [3, 1, 4]
VOCABULARY = 24


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=1, n_head=2,
        initializer_range=0.6, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    return model.eval()


def search(model: Any, options: BeamOptions, ends: list[int], count: int) -> BeamScorer:
    """Run the search on the model's log probabilities."""
    scorer = BeamScorer(options, ends, count)
    most = tokens_per_beam(options, ends)
    while not scorer.is_done:
        logs = torch.tensor([[*PROMPT, *beam.ids] for beam in scorer.running])
        with torch.no_grad():
            found = model(logs).logits[:, -1].log_softmax(-1).topk(min(most, VOCABULARY))
        scorer.add_step(
            [
                [
                    ScoredToken(token, TokenLogprobs(value))
                    for token, value in zip(*row, strict=True)
                ]
                for row in zip(found.indices.tolist(), found.values.tolist(), strict=True)
            ]
        )
    return scorer


@pytest.mark.parametrize("seed", range(40))
def test_answers_and_scores_equal_transformers(seed: int) -> None:
    rng = random.Random(seed)
    model = make_model(seed)
    num_beams, count = rng.randint(2, 6), rng.randint(1, 10)
    ends = rng.sample(range(VOCABULARY), rng.choice([0, 1, 2, 5]))
    stopping: Any = rng.choice([False, True, "never"])
    penalty = rng.choice([1.0, 0.0, 2.0, -1.0, 0.6])
    expected = model.generate(
        torch.tensor([PROMPT]), do_sample=False, num_beams=num_beams, max_new_tokens=count,
        num_return_sequences=num_beams, eos_token_id=ends or None, pad_token_id=0,
        early_stopping=stopping, length_penalty=penalty, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    found = search(model, BeamOptions(num_beams, penalty, stopping), ends, count).finished
    assert len(found) == num_beams
    for beam, row in zip(found, expected.sequences.tolist(), strict=True):
        tokens = row[len(PROMPT) :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        assert list(beam.ids) == tokens[:end]
    scores = [beam.score for beam in found]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
