"""A new chat template of a swarm: its tokenizer is loaded before turns run on it, so no request is refused."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import httpx
from support.eventually import eventually
from support.processes.swarm import MODEL, HashSwarm

SHORT = "{{ messages[0]['content'] }}"
LONG = "{{ messages[0]['content'] * 7 }}"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


def test_no_request_is_refused_while_a_template_changes(tmp_path: Path) -> None:
    (tmp_path / "short").write_text(SHORT)
    (tmp_path / "long").write_text(LONG)
    found: list[tuple[int, str]] = []
    over = threading.Event()
    with HashSwarm(tmp_path / "swarm") as swarm:
        for name, blocks in (("a0", "0:2"), ("a1", "2:4")):
            swarm.server(name, blocks, "--chat-template", str(tmp_path / "short"))
        gateway = swarm.gateway()

        def ask() -> None:
            while not over.is_set():
                answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY, timeout=60)
                tokens = answer.json().get("usage", {}).get("prompt_tokens")
                found.append((answer.status_code, str(tokens or answer.text)))

        asker = threading.Thread(target=ask)
        asker.start()
        try:
            eventually("requests are answered", lambda: len(found) > 3)
            for name, blocks in (("b0", "0:2"), ("b1", "2:4"), ("b2", "0:2")):
                swarm.server(name, blocks, "--chat-template", str(tmp_path / "long"))
            eventually("the new template is used", lambda: found[-1] != found[0])
            seven = found[-1]
            for name in ("a0", "a1"):
                swarm.kill(name, signal.SIGTERM)
            count = len(found)
            eventually("requests go on", lambda: len(found) > count + 5)
        finally:
            over.set()
            asker.join()
    assert {status for status, _ in found} == {200}, found
    assert int(seven[1]) > int(found[0][1])
    assert {tokens for _, tokens in found} == {found[0][1], seven[1]}
