"""`echo` over HTTP: the prompt with its log probabilities, as lm-evaluation-harness asks for them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from support.models.tokenizers import encode_bytes
from support.processes.swarm import (
    BLOCKS,
    MODEL,
    VOCABULARY,
    Endpoints,
    HashSwarm,
)

from modelswarm_serving.model.hash_model import (
    MASK,
    embed,
    key_value,
    output,
    score_token,
)

PROMPT = "The quick brown fox. "


def ask(gateway: Endpoints, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "echo": True, "ignore_eos": True}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body | fields, timeout=300)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()["choices"][0]
    return made


def reference(tokens: list[int]) -> list[float]:
    """Return the log probability of each token but the first, by the hash model's arithmetic."""
    sums, scores = [0] * BLOCKS, []
    for position, token in enumerate(tokens[:-1]):
        row = embed(token)
        for block in range(BLOCKS):
            stored = key_value(block, position, row)
            row = output(stored, sums[block])
            sums[block] = (sums[block] + stored) & MASK
        scores.append(score_token(row, tokens[position + 1], 1, VOCABULARY).logprob)
    return scores


def test_echo_scores_prompt_as_lm_eval_reads_it(gateway: Endpoints) -> None:
    tokens = encode_bytes(PROMPT)
    choice = ask(gateway, prompt=[tokens], max_tokens=1, logprobs=1)
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:-1] == reference(tokens)
    assert len(found["tokens"]) == len(tokens) + 1
    assert "".join(found["tokens"][:-1]) == PROMPT
    assert found["text_offset"][: len(PROMPT)] == list(range(len(PROMPT)))
    assert choice["text"].startswith(PROMPT)


def test_echo_without_tokens_returns_the_scored_prompt(gateway: Endpoints) -> None:
    choice = ask(gateway, max_tokens=0, logprobs=2)
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][1:] == reference(encode_bytes(PROMPT))


def test_echo_without_logprobs_returns_prompt_and_answer(gateway: Endpoints) -> None:
    plain = ask(gateway, echo=False, max_tokens=10)
    choice = ask(gateway, max_tokens=10)
    assert choice["text"] == PROMPT + plain["text"]
    assert choice["logprobs"] is None


def test_named_session_scores_a_prompt_that_it_holds(gateway: Endpoints) -> None:
    first = ask(gateway, max_tokens=5, session_id="known")
    again = ask(gateway, max_tokens=5, session_id="known", logprobs=1)
    assert again["text"] == first["text"]
    found = again["logprobs"]["token_logprobs"]
    assert found[1 : len(PROMPT)] == reference(encode_bytes(PROMPT))


def test_long_prompt_is_scored_across_a_kill_of_the_tail(
    swarm: HashSwarm, gateway: Endpoints
) -> None:
    tokens = [(7 * place) % 200 + 10 for place in range(20_000)]
    swarm.server("s2", "2:4")
    swarm.servers_ready("s2")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, gateway, prompt=tokens, max_tokens=1, logprobs=0)
        time.sleep(0.3)  # most of the prompt is left, or all of it, or none: the answer is the same
        swarm.kill("s1")
        scores = answer.result()["logprobs"]["token_logprobs"]
    assert scores[1:-1] == reference(tokens)
