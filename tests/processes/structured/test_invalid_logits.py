"""A model whose logits become NaN behind one token: that ends the session, is counted, and harms no other one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.tiny_models import make_toy
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running, metrics, running_swarm, total

pytestmark = pytest.mark.full  # a swarm of its own
POISON = 77  # token whose embedding is NaN
BODY: dict[str, Any] = {"model": TOY_MODEL, "max_tokens": 60, "ignore_eos": True, "seed": 1}
CALM = BODY | {"prompt": [5, 6, 7] * 20, "logit_bias": {str(POISON): -100}}
POISONED = BODY | {"prompt": [5, 6, POISON, 7]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_toy(tmp_path_factory.mktemp("invalid"))
    poison(folder)
    with running_swarm(folder, "invalid", spans=2, replicas=2) as made:
        yield made


def poison(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.embed_tokens.weight"
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][POISON] = float("nan")
            save_file(tensors, path, metadata={"format": "pt"})


def post(running: Running, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://{running.local.http}/v1/completions", json=body, timeout=120)


def count(running: Running, name: str, label: str) -> float:
    return total(metrics(running.local.metrics), f"modelswarm_gateway_{name}", label)


def test_session_with_invalid_logits_ends_and_others_go_on(running: Running) -> None:
    calm = post(running, CALM).json()["choices"]
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(post, running, CALM) for _ in range(4)]
        refused = post(running, POISONED)
        assert [each.result().json()["choices"] for each in others] == [calm] * 4
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (500, "stream_broken"), error
    assert "logits are not finite" in error["message"]
    assert refused.headers["x-should-retry"] == "false", "they would be so again"
    assert count(running, "reroutes_total", 'cause="not_finite"') == 1
    assert count(running, "streams_total", 'outcome="failed"') == 1
    running.wait_empty()
    assert post(running, CALM).json()["choices"] == calm, "its pages were used by the other session"


def test_request_that_leaves_no_token_is_not_repeated(running: Running) -> None:
    masks = {"allowed_token_ids": [5], "no_repeat_ngram_size": 1}
    refused = post(running, BODY | masks | {"prompt": [5, 6]})
    assert refused.status_code == 500, refused.text
    assert "leave no token to sample" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
