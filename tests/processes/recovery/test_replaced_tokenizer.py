"""A rollout replaces the tokenizer while sessions are kept: no token id is read in another one's meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from support.eventually import eventually
from support.processes.http_requests import IDS, whole
from support.processes.swarm import HashSwarm, two_spans

NAMED: dict[str, Any] = IDS | {"session_id": "kept", "max_tokens": 5}


def swapped_tokenizer(swarm: HashSwarm, root: Path) -> Path:
    """Write the swarm's tokenizer with the ids of two letters swapped; return its folder."""
    made = json.loads((swarm.folder / "tokenizer.json").read_text())
    ids = made["model"]["vocab"]
    ids["g"], ids["o"] = ids["o"], ids["g"]
    root.mkdir()
    (root / "tokenizer.json").write_text(json.dumps(made))
    return root


def test_log_of_a_replaced_tokenizer_is_not_continued(tmp_path: Path) -> None:
    with two_spans(tmp_path / "swarm") as swarm:
        gateway = swarm.gateway()
        whole(gateway, NAMED)

        def ask(path: str = "completions", **body: Any) -> tuple[int, dict[str, Any]]:
            answer = httpx.post(f"{gateway.url}/v1/{path}", json=body, timeout=60)
            return answer.status_code, answer.json()

        def prompt_ids() -> list[int]:
            status, body = ask(**IDS | {"max_tokens": 1})
            return list(body["choices"][0]["prompt_token_ids"]) if status == 200 else []

        before = prompt_ids()
        own = swapped_tokenizer(swarm, tmp_path / "own")
        for number in range(4):
            blocks = ("0:2", "2:4")[number % 2]
            swarm.server(f"n{number}", blocks, "--tokenizer", f"file://{own}")
        eventually("turns use the new tokenizer", lambda: prompt_ids() == before[::-1])
        status, refused = ask(**NAMED | {"append": True})
        assert (status, refused["error"]["code"]) == (404, "session_expired")
        status, refused = ask("sessions/kept/fork")
        assert (status, refused["error"]["code"]) == (404, "session_expired")
        assert len(whole(gateway, NAMED)) == 5
        assert len(whole(gateway, NAMED | {"append": True})) == 5
