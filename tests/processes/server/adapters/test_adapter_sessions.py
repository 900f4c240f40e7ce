"""Sessions with an adapter on the hash model: exact tokens through kills, takeovers and forks, on the right servers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.http_requests import FOREVER, IDS, lines, read_until, tokens_of, whole
from support.processes.swarm import (
    BLOCKS,
    BRIEF_HOLD,
    ENDLESS,
    MODEL,
    VOCABULARY,
    Endpoints,
    HashSwarm,
)

from modelswarm.client.swarm import SwarmClient
from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.hash_model import reference_tokens

LEASE = ("--lease", "2")
WITH = (*LEASE, "--adapters", "a=one", "--adapters", "b=two")
SHORT: dict[str, Any] = IDS | {"max_tokens": 30}


@pytest.fixture
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    """Yield two servers of each half with adapters, and one of the second half without."""
    with HashSwarm(tmp_path_factory.mktemp("adapters"), context=ENDLESS) as made:
        for name, blocks, flags in (
            *(("s0", "0:2", WITH), ("t0", "0:2", WITH), ("s1", "2:4", WITH), ("t1", "2:4", WITH)),
            ("p1", "2:4", LEASE),
        ):
            made.server(name, blocks, *flags)
        made.servers_ready("s0", "t0", "s1", "t1", "p1")
        yield made


def linked(swarm: HashSwarm, *flags: str, name: str = "gateway") -> Endpoints:
    """Start a gateway, and wait until it is linked to all servers: it is ready without those of the adapters."""
    made, count = swarm.gateway(*LEASE, *flags, name=name), len(list(swarm.members.glob("*.json")))
    with SwarmClient(made.admin) as client:
        eventually("all are linked", lambda: len(client.fetch_snapshot().servers) == count)
    return made


def expected(count: int, adapter: str = "", prompt: str = "go", **sampling: Any) -> list[int]:
    tokens = encode_bytes(prompt)
    return reference_tokens(
        tokens, Sampling(**sampling), count, len(tokens) + count,
        n_blocks=BLOCKS, vocabulary=VOCABULARY, adapter=adapter,
    )  # fmt: skip


def kill_route(swarm: HashSwarm, gateway: Endpoints, session: str, model: str, place: int) -> str:
    found = httpx.get(f"{gateway.url}/v1/sessions/{session}", params={"model": model}).json()
    name: str = found["route"][place]["server"]
    swarm.kill(name)
    return name


def test_adapters_have_their_own_tokens_and_sessions(swarm: HashSwarm) -> None:
    gateway = linked(swarm)
    models = httpx.get(f"{gateway.url}/v1/models").json()["data"]
    assert {(m["id"], m["parent"], m["root"]) for m in models} == {
        *((MODEL, None, MODEL), ("a", MODEL, MODEL), ("b", MODEL, MODEL))
    }
    names = [MODEL, "a", "b"] * 4
    with ThreadPoolExecutor(12) as pool:
        bodies = [SHORT | {"model": name, "session_id": "same"} for name in names[:3]]
        bodies += [SHORT | {"model": name} for name in names[3:]]
        answers = list(pool.map(lambda body: whole(gateway, body), bodies))
    for name, answer in zip(names, answers, strict=True):
        assert answer == expected(30, "" if name == MODEL else name), name
    for name in names[:3]:  # the second turn of each session continues its own log
        log = httpx.get(f"{gateway.url}/v1/sessions/same", params={"model": name}).json()
        assert (log["model"], log["position"]) == (name, len(encode_bytes("go")) + 30)
    assert all(route_servers(gateway, name).isdisjoint({"p1"}) for name in ("a", "b"))


def route_servers(gateway: Endpoints, model: str) -> set[str]:
    found = httpx.get(f"{gateway.url}/v1/sessions/same", params={"model": model}).json()
    return {hop["server"] for hop in found["route"]}


def test_unknown_adapter_is_an_unknown_model(swarm: HashSwarm) -> None:
    gateway = linked(swarm)
    answer = httpx.post(f"{gateway.url}/v1/completions", json=SHORT | {"model": "c"}, timeout=60)
    assert answer.status_code == 404
    assert "'c'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("place", [0, 1])
def test_killed_hop_of_an_adapter_session_changes_no_token(swarm: HashSwarm, place: int) -> None:
    gateway = linked(swarm)
    body = FOREVER | {"model": "a", "session_id": "talk", "temperature": 1.0, "seed": 7}
    killed: list[str] = []

    def kill() -> None:
        killed.append(kill_route(swarm, gateway, "talk", "a", place))

    def has_left(_: list[str]) -> bool:
        found = httpx.get(f"{gateway.url}/v1/sessions/talk", params={"model": "a"}).json()
        return killed[0] not in {hop["server"] for hop in found["route"]}

    tokens, _ = read_until(gateway, body, kill, has_left)
    assert tokens == expected(len(tokens), "a", temperature=1.0, seed=7)
    assert killed[0] != "p1"


def test_taken_over_session_keeps_its_adapter(swarm: HashSwarm) -> None:
    one, two = linked(swarm, name="one"), linked(swarm, name="two")
    body = SHORT | {"model": "b", "session_id": "talk"}
    first = whole(one, body)
    swarm.kill("one")
    more = {"prompt": "on", "append": True}

    def continued() -> list[int]:
        answer = httpx.post(f"{two.url}/v1/completions", json=body | more, timeout=60)
        ids: list[int] = answer.json()["choices"][0]["token_ids"] if answer.is_success else []
        return ids

    second = eventually("the other gateway has the session", continued)
    log = [*encode_bytes("go"), *first, *encode_bytes("on")]
    assert second == reference_tokens(
        log, Sampling(), 30, len(log) + 30, n_blocks=BLOCKS, vocabulary=VOCABULARY, adapter="b"
    )


def test_fork_keeps_the_adapter(swarm: HashSwarm) -> None:
    gateway = linked(swarm)
    whole(gateway, SHORT | {"model": "a", "session_id": "parent"})
    answers = httpx.post(
        f"{gateway.url}/v1/completions",
        json=SHORT | {"model": "a", "n": 3, "temperature": 1.0, "seed": 1},
        timeout=60,
    ).json()["choices"]
    for choice in answers:
        right = expected(30, "a", temperature=1.0, seed=1, choice=choice["index"])
        assert choice["token_ids"] == right


def test_server_without_the_adapter_serves_only_the_model(swarm: HashSwarm) -> None:
    gateway = linked(swarm, *BRIEF_HOLD)
    swarm.kill("s1")
    swarm.kill("t1")

    def refusal() -> str:
        answer = httpx.post(
            f"{gateway.url}/v1/completions", json=SHORT | {"model": "a"}, timeout=60
        )
        return "" if answer.is_success else answer.json()["error"]["message"]

    assert "blocks 2:4 of a" in eventually("the adapter has no server", refusal)
    assert whole(gateway, SHORT) == expected(30)


def test_servers_of_other_adapter_weights_never_share_a_route(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with HashSwarm(tmp_path_factory.mktemp("revisions"), context=ENDLESS) as swarm:
        swarm.server("s0", "0:2", "--adapters", "a=one")
        swarm.server("s1", "2:4", "--adapters", "a=one")
        swarm.server("t1", "2:4", "--adapters", "a=other")
        swarm.servers_ready("s0", "s1", "t1")
        gateway = linked(swarm, *BRIEF_HOLD)
        tokens: list[int] = []
        killed = False
        error = ""
        for line in lines(gateway, FOREVER | {"model": "a", "session_id": "talk"}):
            if line.startswith('data: {"error"'):
                error = line
                break
            tokens += tokens_of(line)
            if not killed and len(tokens) > 20:
                assert kill_route(swarm, gateway, "talk", "a", 1) == "s1"
                killed = True
        assert error and tokens == expected(len(tokens), "a")
