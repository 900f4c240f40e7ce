"""Rows of a batch survive their gateway, and the classes are imported only when they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.swarm import BLOCKS, ENDLESS, MODEL, VOCABULARY, two_spans

from modelswarm.client.hf.rows import start_answers
from modelswarm.client.sessions.connection import Connection
from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.wire import api_pb2
from modelswarm_serving.model.hash_model import reference_tokens

COUNT = 1500


@pytest.mark.full
def test_answers_survive_their_gateway(tmp_path: Path) -> None:
    """Another gateway listens at the same address, as behind a Kubernetes Service."""
    prompts = [[11, 12, 13], [21, 22]]
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        lost = swarm.gateway(name="lost")
        connection = Connection(lost.grpc)
        requests = [
            api_pb2.GenerateRequest(
                model=MODEL,
                tokens=api_pb2.TokenIds(ids=prompt),
                max_tokens=COUNT,
                sampling=api_pb2.Sampling(temperature=1.0, seed=9, repetition_penalty=1.2),
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        rows = start_answers(connection, requests)
        got: list[list[int | None]] = [[row.next_token() for _ in range(20)] for row in rows]
        swarm.kill("lost")
        swarm.gateway("--grpc", lost.grpc, name="found")
        for row, tokens in zip(rows, got, strict=True):
            while (token := row.next_token()) is not None:
                tokens.append(token)
        connection.close()
    sampling = Sampling(temperature=1.0, seed=9, repetition_penalty=1.2)
    for prompt, tokens in zip(prompts, got, strict=True):
        length = len(prompt) + COUNT
        assert tokens == reference_tokens(
            prompt, sampling, COUNT, length, n_blocks=BLOCKS, vocabulary=VOCABULARY
        )


@pytest.mark.full
def test_torch_is_imported_with_the_first_class_only() -> None:
    script = """
import sys
import modelswarm, modelswarm.client, modelswarm.client.hf, modelswarm.client.sessions.session
assert not {"torch", "transformers"} & set(sys.modules), "imported too early"
from modelswarm import AutoDistributedModelForCausalLM
assert "torch" in sys.modules
"""
    made = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stderr
