"""Server processes as a gateway uses them: start, requests, missing credit, stop, kill."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eventually import eventually
from support.models.tiny_models import load_whole, make_model
from support.processes.fake_gateway import fake_gateway
from support.processes.link_peers import hello, raw_peer
from support.processes.server import ENVIRONMENT, command, refusal, servers

from modelswarm.protocol.messages import FaultKind, Heartbeat, Lane, Sampling
from modelswarm_serving.model.hash_model import reference_tokens

HASH = ("--hash-model", "--pages", "64")
PROMPT = list(range(1, 40))


def expected(prompt: list[int], count: int, sampling: Sampling | None = None) -> list[int]:
    end = len(prompt) + count
    sampling = sampling or Sampling()
    return reference_tokens(prompt, sampling, count, end, n_blocks=8, vocabulary=256)


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param(["0:8"], marks=pytest.mark.full),
        ["0:4", "4:8"],
        pytest.param(["0:2", "2:5", "5:6", "6:8"], marks=pytest.mark.full),
    ],
)
async def test_hash_servers_give_the_tokens_of_the_whole_model(
    tmp_path: Path, spans: list[str]
) -> None:
    async with servers(tmp_path, spans, *HASH) as started, fake_gateway(started) as gateway:
        for session, sampling in (("one", Sampling()), ("two", Sampling(temperature=1.0, seed=7))):
            route = await gateway.open(session, len(PROMPT) + 100, sampling)
            assert await gateway.generate(route, PROMPT) == expected(PROMPT, 100, sampling)
            gateway.close(route)
        await gateway.all_pages_free()


@pytest.mark.full
async def test_long_prompt_is_sent_in_several_steps_and_frames(tmp_path: Path) -> None:
    prompt = [i % 251 for i in range(3000)]
    flags = ("--hash-model", "--pages", "400")
    async with (
        servers(tmp_path, ["0:4", "4:8"], *flags) as started,
        fake_gateway(started) as gateway,
    ):
        route = await gateway.open("long", len(prompt) + 20)
        assert await gateway.generate(route, prompt) == expected(prompt, 20)


@pytest.mark.full
async def test_ready_server_describes_itself_in_its_run_file(tmp_path: Path) -> None:
    flags = ("--metrics", "127.0.0.1:0", "--incarnation", "7", "--served-name", "m")
    async with servers(tmp_path, ["2:4"], *HASH, *flags) as (server,):
        member = server.member
        assert (member["name"], member["model"]) == ("s0", "m")
        assert (member["first"], member["last"], member["n_blocks"]) == (2, 4, 8)
        assert member["peer"].startswith("s0/7/")
        assert member["pid"] == server.process.pid
        async with fake_gateway([server]) as gateway:
            hello = gateway.received.up[0]
            assert (hello.peer, hello.target) == (member["peer"], member["target"])
            assert (hello.model, hello.revision) == ("m", member["revision"])
            assert (hello.total_pages, hello.page_size, hello.row_bytes) == (64, 16, 8)


@pytest.mark.full
async def test_metrics_count_what_was_run(tmp_path: Path) -> None:
    async with servers(tmp_path, ["0:8"], *HASH, "--metrics", "127.0.0.1:0") as (server,):
        async with fake_gateway([server]) as gateway:
            route = await gateway.open("s", len(PROMPT) + 10)
            await gateway.generate(route, PROMPT)
        url = f"http://{server.member['metrics']}/metrics"
        of = 'blocks="0:8"', 'model="hash"'

        def metric(name: str, *labels: str) -> str:
            return f"modelswarm_server_{name}{{{','.join(sorted((*of, *labels)))}}}"

        def fetch_values() -> dict[str, float] | None:
            """Return what the server exports once its gauges have followed the session."""
            text = urllib.request.urlopen(url).read().decode()
            lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
            found = {name: float(number) for name, number in lines}
            return found if found.get(metric("kv_pages", 'state="used"')) else None

        values = await asyncio.to_thread(eventually, "used pages in the metrics", fetch_values)

        def value(name: str, *labels: str) -> float:
            return values[metric(name, *labels)]

        assert value("rows_total") == len(PROMPT) + 9
        assert value("step_seconds_count") >= 10
        pages = [value("kv_pages", f'state="{state}"') for state in ("used", "reserved", "free")]
        assert sum(pages) == 64
        assert pages[0] == -(-(len(PROMPT) + 9) // 16)
        assert value("kv_recovery_pages") == 7
        assert value("sessions", 'state="running"') + value("sessions", 'state="idle"') == 1
        assert value("fault_reports_total", 'kind="gap"') == 0


@pytest.mark.full
async def test_heartbeats_come_often_while_a_session_runs(tmp_path: Path) -> None:
    async with servers(tmp_path, ["0:8"], *HASH) as started, fake_gateway(started) as gateway:
        await gateway.received.until(lambda: bool(gateway.of(Heartbeat)), 3.0)
        route = await gateway.open("s", 400)
        gateway.go(route, PROMPT, credit=len(PROMPT) + 1)  # the session waits for credit
        seen, began = len(gateway.of(Heartbeat)), time.monotonic()
        await gateway.received.until(lambda: len(gateway.of(Heartbeat)) - seen >= 20)
        assert 1.5 < time.monotonic() - began < 4.0


async def test_transformer_over_two_servers_equals_generate(
    tmp_path: Path,
) -> None:
    folder = make_model(tmp_path / "model")
    members = tmp_path / "members"
    async with servers(members, ["0:2", "2:4"], "--model", f"file://{folder}") as started:
        async with fake_gateway(started) as gateway:
            prompt = PROMPT[:20]
            route = await gateway.open("s", len(prompt) + 30)
            tokens = await gateway.generate(route, prompt)
            tokenizer = await gateway.file("tokenizer.json")
            assert tokenizer == (folder / "tokenizer.json").read_bytes()
            gateway.close(route)
            await gateway.all_pages_free()
        for server in started:
            server.process.send_signal(signal.SIGTERM)
        assert [await server.exit_code() for server in started] == [0, 0]
    whole: Any = load_whole(folder)
    answer = whole.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None
    )
    assert tokens == answer[0][len(prompt) :].tolist()


@pytest.mark.full
async def test_only_the_files_of_a_tokenizer_are_given_out(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (tmp_path / "secret.json").write_text("{}")
    big = os.urandom(1_000_000)
    (folder / "chat_template.jinja").write_bytes(big)
    (folder / "special_tokens_map.json").write_bytes(b"")
    flags = ("--hash-model", "--model", f"file://{folder}")
    async with (
        servers(tmp_path / "members", ["0:4"], *flags) as started,
        fake_gateway(started) as gateway,
    ):
        assert await gateway.file("config.json") == (folder / "config.json").read_bytes()
        assert await gateway.file("chat_template.jinja") == big
        assert await gateway.file("special_tokens_map.json") == b""
        for name in (
            "added_tokens.json",
            "model.safetensors",
            "../secret.json",
            "",
            "/etc/passwd",
        ):
            assert await gateway.file(name) is None


@pytest.mark.full
async def test_garbage_on_one_link_leaves_the_others_alone(tmp_path: Path) -> None:
    async with servers(tmp_path, ["0:8"], *HASH) as started, fake_gateway(started) as gateway:
        route = await gateway.open("s", len(PROMPT) + 50)
        gateway.node.target = started[0].address.target
        async with raw_peer(gateway.node, hello("bad/1/x"), (Lane.LIVE, Lane.BULK)) as bad:
            await bad.lanes[Lane.BULK].write(os.urandom(1000))
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(5):
                    await bad.lanes[Lane.LIVE].read()
        assert await gateway.generate(route, PROMPT) == expected(PROMPT, 50)


async def test_a_killed_successor_is_reported(tmp_path: Path) -> None:
    async with (
        servers(tmp_path, ["0:4", "4:8"], *HASH) as started,
        fake_gateway(started) as gateway,
    ):
        route = await gateway.open("s", 900)
        gateway.go(
            route, PROMPT, credit=len(PROMPT) + 20
        )  # the answer does not end before the kill
        await gateway.received.until(lambda: len(gateway.tokens) > 10)
        started[1].process.kill()
        await gateway.received.until(lambda: bool(gateway.reports and gateway.received.down))
        report = gateway.reports[0]
        assert (report.kind, report.peer) == (
            FaultKind.LINK_DOWN,
            started[1].address.peer,
        )
        assert gateway.received.down[0][0] == started[1].address.peer


async def test_pages_of_lost_gateway_are_free_after_its_lease(tmp_path: Path) -> None:
    async with servers(tmp_path, ["0:8"], *HASH, "--lease", "0.4") as started:
        async with fake_gateway(started, "first/1/x") as gateway:
            route = await gateway.open("s", 500)
            gateway.go(route, PROMPT, credit=len(PROMPT))
            await gateway.received.until(lambda: bool(gateway.tokens))
        async with fake_gateway(started, "second/1/x") as other:
            await other.all_pages_free()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
async def test_a_signal_stops_a_server_gracefully(tmp_path: Path, number: signal.Signals) -> None:
    flags = (*HASH, "--drain-timeout", "0.2")
    async with servers(tmp_path, ["0:8"], *flags) as (server,), fake_gateway([server]) as gateway:
        route = await gateway.open("s", 900)
        gateway.go(route, PROMPT)
        await gateway.received.until(lambda: len(gateway.tokens) > 10)
        server.process.send_signal(number)
        await gateway.received.until(lambda: bool(gateway.received.down))
        assert await server.exit_code() == 0
        assert not server.file.exists()


@pytest.mark.full
async def test_a_server_dies_with_its_parent(tmp_path: Path) -> None:
    parent_fd, held = os.pipe()
    async with servers(
        tmp_path, ["0:8"], *HASH, "--parent-fd", str(parent_fd), pass_fds=[parent_fd]
    ) as (server,):
        os.close(parent_fd)
        os.close(held)
        assert await server.exit_code() == 1


async def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    async with servers(tmp_path, ["0:8"], *HASH) as (server,):
        target = server.member["target"]
        for flag in ("--listen", "--metrics"):
            code, stderr = await refusal(*command(tmp_path, "s9", "0:8", *HASH, flag, target))
            assert code == 2
            sentence = stderr.splitlines()[-1]
            assert f"{flag}: cannot listen on {target}: address already in use" in sentence
            assert "Traceback" not in stderr
        assert not (tmp_path / "s9.json").exists()


@pytest.mark.full
async def test_unwritable_discovery_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, stderr = await refusal(*command(tmp_path / "file" / "below", "s0", "0:8", *HASH))
    assert code == 2
    assert stderr.startswith("modelswarm-server: --discovery-dir: ")
    assert len(stderr.splitlines()) == 1


@pytest.mark.full
async def test_invalid_host_is_one_sentence(tmp_path: Path) -> None:
    for host in ("no..host", "no-such-host.invalid"):
        code, stderr = await refusal(
            *command(tmp_path, "s0", "0:8", *HASH, "--listen", f"{host}:0")
        )
        assert code == 2
        assert stderr.startswith(f"modelswarm-server: --listen: cannot listen on {host}:0: ")
        assert len(stderr.splitlines()) == 1


BAD_MODELS = {
    "no such folder": (("--model", "file:///no/such/folder", "--blocks", "0:2"), "--model"),
    "an unknown scheme": (("--model", "ftp://x", "--blocks", "0:2"), "--model"),
    "blocks out of range": (("--model", "MODEL", "--blocks", "2:9"), "--blocks"),
    "too little memory": (("--model", "MODEL", "--blocks", "0:2", "--memory", "1Ki"), "--memory"),
    "no tokenizer": (("--model", "BARE", "--blocks", "0:2"), "--model"),
    "hash blocks out of range": (("--hash-model", "--blocks", "0:9"), "--blocks"),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def bare_copy(folder: Path, into: Path) -> str:
    """Return a copy of the model without its tokenizer."""
    bare = into / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.name != "tokenizer.json":
            (bare / file.name).symlink_to(file)
    return f"file://{bare}"


def exists(path: Path) -> bool:
    return path.exists()


@pytest.mark.full
@pytest.mark.parametrize(("flags", "field"), BAD_MODELS.values(), ids=BAD_MODELS.keys())
async def test_unservable_model_is_one_sentence(
    tmp_path: Path, model_folder: Path, flags: tuple[str, ...], field: str
) -> None:
    folders = {"MODEL": f"file://{model_folder}", "BARE": bare_copy(model_folder, tmp_path)}
    arguments = [folders.get(flag, flag) for flag in flags]
    members = tmp_path / "members"
    fixed = command(members, "s0", "0:2")[:-2]
    code, stderr = await refusal(*fixed, *arguments)
    assert code == 2
    assert stderr.startswith(f"modelswarm-server: {field}: ")
    assert len(stderr.splitlines()) == 1
    assert not exists(members)


@pytest.mark.full
async def test_a_signal_during_the_start_ends_it_quietly(
    tmp_path: Path, model_folder: Path
) -> None:
    arguments = command(tmp_path / "members", "s0", "0:2", "--model", f"file://{model_folder}")
    process = await asyncio.create_subprocess_exec(
        *arguments, env=ENVIRONMENT, stderr=asyncio.subprocess.PIPE
    )
    await asyncio.sleep(1.5)  # torch is imported now
    process.terminate()
    async with asyncio.timeout(10):
        _, stderr = await process.communicate()
    # On a very busy machine the signal may arrive before the handler is installed.
    assert process.returncode in (0, -signal.SIGTERM)
    assert stderr.decode() == ""
