"""`modelswarm ui` over HTTP: snapshots, chat and kills, and requests that other sites could send."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.eventually import eventually
from support.processes.programs.browser_page import Page, example_swarm, open_page
from support.processes.swarm import MODEL, HashSwarm, two_spans

from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import session_wire_name

KILL = "/api/servers/counting-s0-r0/kill"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    with example_swarm(tmp_path_factory.mktemp("runtime"), hash_model=True) as made:
        yield made


@pytest.fixture(scope="module")
def page(local: LocalSwarm) -> Iterator[Page]:
    with open_page("--name", "counting") as opened:
        yield opened


@pytest.fixture(scope="module")
def elsewhere(local: LocalSwarm) -> Iterator[Page]:
    """Yield the page of the same swarm, given by its address as one in a cluster is."""
    with open_page("--url", f"http://{local.http}") as opened:
        yield opened


@pytest.mark.full
def test_page_loads_nothing_from_elsewhere(page: Page) -> None:
    answer = httpx.get(page.url, timeout=60)
    policy = answer.headers["content-security-policy"]
    nonce = policy.split("script-src 'nonce-")[1].split("'")[0]
    assert answer.status_code == 200 and f'<script nonce="{nonce}">' in answer.text
    assert policy.startswith("default-src 'none'; ") and "frame-ancestors 'none'" in policy
    assert "{{nonce}}" not in answer.text and nonce not in httpx.get(page.url, timeout=60).text
    assert not any(each in answer.text for each in ("src=", "href=", "@import", "url("))
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"


def test_snapshots_are_those_of_the_admin_port(page: Page) -> None:
    shown = page.first_snapshot()
    assert (shown["can_kill"], shown["can_chat"], shown["error"]) == (True, True, None)
    assert shown["swarm"] == "counting" and shown["models"][0]["ready"]
    assert sorted((each["server"], each["first"], each["last"]) for each in shown["servers"]) == [
        ("counting-s0-r0", 0, 4),
        ("counting-s0-r1", 0, 4),
        ("counting-s1-r0", 4, 8),
        ("counting-s1-r1", 4, 8),
    ]


def chat(page: Page, session: str) -> tuple[str, str]:
    """Return the answer's text, and the session's name in snapshots."""
    question = [{"role": "user", "content": "Count."}]
    answer = page.post(
        "/api/chat", {"model": "counting", "messages": question, "session_id": session}
    )
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events[-1]["finish_reason"] in ("stop", "length"), events[-1]
    return "".join(each["text"] for each in events), answer.headers["x-modelswarm-session"]


def test_chat_is_answered_and_its_session_is_shown(page: Page) -> None:
    text, name = chat(page, "one")
    assert len(text) > 0 and name == session_wire_name("counting", "one")
    sessions = {each["id"]: each for each in page.first_snapshot()["sessions"]}
    assert [hop["first"] for hop in sessions[name]["route"]] == [0, 4]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages: must be a list of 1 to 1000"),
        ({"messages": ["x"]}, "messages: must be objects"),
        ({"session_id": 1}, "model: and session_id must be texts"),
        ({"temperature": 0}, "temperature: not allowed; allowed: model, messages, session_id"),
    ],
)
def test_wrong_chat_is_refused_by_name(page: Page, change: dict[str, object], named: str) -> None:
    body = {"model": "counting", "messages": [{"role": "user", "content": "a"}], "session_id": "x"}
    answer = page.post("/api/chat", body | change)
    assert (answer.status_code, answer.json()["error"][: len(named)]) == (400, named)


def test_unknown_model_of_a_chat_is_told_in_the_stream(page: Page) -> None:
    body = {"model": "none", "messages": [{"role": "user", "content": "a"}], "session_id": "x"}
    answer = page.post("/api/chat", body)
    assert "the model 'none' does not exist here" in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Host": "evil.example"},  # a name that leads to 127.0.0.1
        {"Host": "127.0.0.1.evil.example:80"},
        {"X_ModelSwarm_Token": ""},
        {"X_ModelSwarm_Token": secrets.token_urlsafe(32)},
    ],
)
@pytest.mark.parametrize("path", [KILL, "/api/chat"])
def test_request_of_another_site_does_nothing(
    page: Page, local: LocalSwarm, path: str, headers: dict[str, str]
) -> None:
    before = pids(local)
    assert page.post(path, **headers).status_code == 403
    assert pids(local) == before


def test_page_and_snapshots_need_the_token(page: Page) -> None:
    for path in ("/", f"/?token={secrets.token_urlsafe(32)}", "/api/snapshots", "/api/none"):
        answer = httpx.get(f"{page.base}{path}", timeout=60)
        assert answer.status_code == 403 and "token" in answer.json()["error"]
        assert page.token not in answer.text
    answer = httpx.get(page.url, headers={"Host": "evil.example"}, timeout=60)
    assert answer.status_code == 403 and page.token not in answer.text


def test_kill_of_a_swarm_elsewhere_is_impossible(elsewhere: Page, local: LocalSwarm) -> None:
    before = pids(local)
    shown = elsewhere.first_snapshot()
    assert (shown["can_kill"], shown["swarm"]) == (False, None)
    assert elsewhere.post(KILL).status_code == 404
    assert pids(local) == before
    assert len(chat(elsewhere, "two")[0]) > 0


def test_chat_needs_an_http_address(local: LocalSwarm) -> None:
    with open_page("--admin", local.admin) as opened:
        assert not opened.first_snapshot()["can_chat"]
        answer = opened.post("/api/chat", {})
        assert (answer.status_code, answer.json()["error"].split(":")[0]) == (400, "--url")
        assert opened.post(KILL).status_code == 404


def test_kill_ends_one_server_and_a_chat_goes_on(page: Page, local: LocalSwarm) -> None:
    text, _ = chat(page, "before")
    wrong = page.post("/api/servers/gateway/kill")
    assert wrong.status_code == 400 and "'gateway' does not run here; allowed: " in wrong.text
    before = pids(local)
    answer = page.post(KILL)
    assert answer.json() == {"server": "counting-s0-r0", "pid": before["counting-s0-r0"]}
    assert chat(page, "after")[0] == text
    eventually("it is started again", lambda: local.wait_ready(0.1), 60)
    now = pids(local)
    assert {name for name in now if now[name] != before[name]} == {"counting-s0-r0"}


def pids(local: LocalSwarm) -> dict[str, int | None]:
    return {server.job_status.name: server.job_status.pid for server in local.servers}


# ---- the page of a gateway itself


def test_gateway_serves_the_page_itself(tmp_path: Path) -> None:
    with two_spans(tmp_path) as swarm:
        swarm.gateway("--ui", "127.0.0.1:0")
        eventually("the page's address is logged", lambda: "the page is at" in swarm.log("gateway"))
        page = Page(swarm.log("gateway").split("the page is at ")[1].split()[0])
        shown = page.first_snapshot()
        assert (shown["can_kill"], shown["can_chat"], shown["error"]) == (False, True, None)
        assert sorted((each["first"], each["last"]) for each in shown["servers"]) == [
            (0, 2),
            (2, 4),
        ]
        question = [{"role": "user", "content": "one"}]
        body = {"model": MODEL, "messages": question, "session_id": "page"}
        answer = page.post("/api/chat", body)
        assert answer.status_code == 200 and '"finish_reason"' in answer.text
        assert httpx.get(page.base, timeout=60).status_code == 403
        assert page.post("/api/servers/s0/kill").status_code == 404


def test_gateway_serves_no_page_to_other_machines(tmp_path: Path) -> None:
    flags = ["--ui", "0.0.0.0:0"]
    for flag in ("--http", "--grpc", "--admin", "--metrics"):
        flags += [flag, "127.0.0.1:0"]
    with HashSwarm(tmp_path) as swarm:
        assert swarm.start("gateway", "modelswarm_gateway", *flags).wait(120) == 2
        log = swarm.log("gateway")
    assert "--ui: '0.0.0.0' is not an address of this machine alone" in log
