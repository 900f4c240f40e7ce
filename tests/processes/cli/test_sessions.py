"""`modelswarm sessions` against a real swarm: list, show, fork and close, also after a kill; absent sessions."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx
import pytest
from support.processes.swarm import MODEL, Endpoints, HashSwarm

from modelswarm.protocol.identity import session_wire_name

pytestmark = pytest.mark.full

TOKENS = 20


def sessions(gateway: Endpoints, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "modelswarm.cli", "sessions", *arguments, "--url", gateway.url),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def told(gateway: Endpoints, *arguments: str) -> dict[str, Any]:
    done = sessions(gateway, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def run_turn(gateway: Endpoints, session: str, text: str, **fields: Any) -> str:
    body = {"model": MODEL, "prompt": text, "max_tokens": TOKENS, "session_id": session}
    body |= {"temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    made: str = answer.json()["choices"][0]["text"]
    return made


def listed(gateway: Endpoints) -> dict[str, dict[str, Any]]:
    return {each["session"]: each for each in told(gateway, "list")["sessions"]}


def short_name(session: str) -> str:
    """Return the name that tables show for a session_id."""
    return session_wire_name(MODEL, session).rsplit(":", 1)[-1]


def test_session_is_listed_shown_and_closed(gateway: Endpoints) -> None:
    run_turn(gateway, "one", "hello")

    found = listed(gateway)[short_name("one")]
    assert (found["model"], found["state"], found["gateway"]) == (MODEL, "parked", None)
    assert short_name("one") in sessions(gateway, "list").stdout

    shown = told(gateway, "show", "one")
    assert (shown["id"], shown["position"]) == ("one", found["length"])
    assert [hop["server"] for hop in shown["route"]] == ["s0", "s1"]
    text = sessions(gateway, "show", "one").stdout
    assert text.startswith(f"one: {shown['state']}, {MODEL}\n")
    assert "route: s0 [0:2] -> s1 [2:4]" in text

    assert sessions(gateway, "close", "one").stdout == "one: closed\n"
    assert short_name("one") not in listed(gateway)
    assert sessions(gateway, "show", "one").returncode == 1
    for verb in ("show", "close", "fork"):
        other = sessions(gateway, verb, "one", "--model", "nope")
        assert other.returncode == 2
        assert f"--model: 'nope' is not served here; known are: {MODEL}" in other.stderr


def test_absent_session_is_named_and_exit_code_1(gateway: Endpoints) -> None:
    run_turn(gateway, "there", "hello")

    done = sessions(gateway, "close", "absent", "there", "--json")
    assert done.returncode == 1
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"id": "absent", "closed": False},
        {"id": "there", "closed": True},
    ]
    for arguments in (("show", "absent"), ("fork", "absent")):
        done = sessions(gateway, *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Error: ") and "absent" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_fork_goes_on_from_its_position_after_a_kill(swarm: HashSwarm, gateway: Endpoints) -> None:
    first = run_turn(gateway, "tree", "once")
    expected = run_turn(gateway, "tree", " more", append=True)
    position = told(gateway, "show", "tree")["position"]
    run_turn(gateway, "stem", "once")
    assert run_turn(gateway, "stem", "once") == first
    stem = told(gateway, "show", "stem")["position"]
    swarm.server("s1b", "2:4")
    swarm.servers_ready("s1b")
    swarm.kill("s1")

    made = told(gateway, "fork", "stem", "branch")

    assert (made["id"], made["position"]) == ("branch", stem)
    assert run_turn(gateway, "branch", " more", append=True) == expected
    assert told(gateway, "show", "branch")["position"] == position
    part = told(gateway, "fork", "stem", "--position", "3")
    assert part["position"] == 3 and part["id"].startswith("sess_")
    done = sessions(gateway, "fork", "stem", "branch")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def test_list_without_sessions_says_so(gateway: Endpoints) -> None:
    for each in ("tree", "stem", "branch"):
        sessions(gateway, "close", each)

    rest = listed(gateway)
    if not rest:
        assert sessions(gateway, "list").stdout == "no sessions\n"
    assert not {short_name(each) for each in ("tree", "stem", "branch")} & set(rest)
