"""Hostile tokenizers: each ends its own requests only, and its processes end with the gateway.

The time limits are of processor time, which other load on the machine does not use up.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.eventually import SECONDS, eventually
from support.models.tokenizers import (
    byte_level,
    encode_bytes,
    make_tokenizer,
    model_files,
    sentencepiece_like,
)
from unit.gateway.models.test_model_registry import HELLO, RegistryHarness

from modelswarm.checkpoint.tokenizer import MAX_STEPS, MAX_TOKEN_BYTES, MAX_TOKEN_IDS
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import (
    ChatPrompt,
    GenerationRequest,
    TextPrompt,
    encode_prompt,
)
from modelswarm_gateway.models.circuit_breaker import (
    MAX_FAILURES,
    REFUSAL_SECONDS,
    CircuitBreaker,
)
from modelswarm_gateway.models.model_process import ModelProcessError, child_environment
from modelswarm_gateway.models.model_requests import SMALL_REQUEST_BYTES
from modelswarm_gateway.models.sampling_defaults import MAX_END_TOKENS, SamplingOptions
from modelswarm_gateway.models.token_table import TokenTable, pack_table
from modelswarm_gateway.models.tokenizer import EncodeError, ModelFilesError, ModelTokenizer

DOUBLINGS = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 60
# Each run of 22 letters takes four million steps, below the library's limit for one match.
REGEX = {"Regex": "(a+)+b"}
EVIL_TEXT = ("a" * 22 + " ") * 2000
HOSTILE: dict[str, dict[str, Any]] = {
    "regex in the normalizer": {
        "normalizer": {"type": "Replace", "pattern": REGEX, "content": "x"}
    },
    "regex in the pre-tokenizer": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": REGEX,
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "normalizer that allocates": {"normalizer": {"type": "Sequence", "normalizers": DOUBLINGS}},
}


def hostile_files(**changes: Any) -> dict[str, bytes]:
    """Return model files with `changes` in their tokenizer.json."""
    tokenizer = json.loads(byte_level().to_str()) | changes
    return model_files() | {"tokenizer.json": json.dumps(tokenizer).encode()}


def make_hostile(**changes: Any) -> ModelTokenizer:
    return ModelTokenizer(hostile_files(**changes), cpu_seconds=0.5, name="evil")


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_tokenizer_ends_its_own_requests_only(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = set(children_of(os.getpid()))
    hostile = make_hostile(**changes)
    (process,) = set(children_of(os.getpid())) - before
    other = make_tokenizer()
    os.killpg(process, signal.SIGSTOP)  # its request lasts as long as wanted
    request = asyncio.create_task(hostile.encode(EVIL_TEXT, special=False))
    for _ in range(3):
        assert await other.encode("hi", special=False) == encode_bytes("hi")
        assert other.decode(encode_bytes("hi")) == "hi"
    assert not request.done()
    os.killpg(process, signal.SIGCONT)
    with pytest.raises(EncodeError, match=r"took more than 0\.5 s|needed more than 64 MiB"):
        await request
    assert "a process of the model evil ended: it " in caplog.text
    assert await hostile.encode("hi", special=False) == encode_bytes("hi"), "a new worker"
    assert hostile.chat_fault == ""


async def test_failures_in_a_row_refuse_the_prompts_of_this_model() -> None:
    files = hostile_files(**HOSTILE["normalizer that allocates"])
    hostile, other = make_tokenizer(files), make_tokenizer()
    request = GenerationRequest("m", TextPrompt("aaaa"), "prompt", SamplingOptions())
    chat = GenerationRequest(
        "m", ChatPrompt([{"role": "user", "content": "aaaa"}]), "messages", SamplingOptions()
    )
    for each in (request, request, chat):
        with pytest.raises(ApiError, match="the model's tokenizer needed more than") as failed:
            await encode_prompt(each, hostile, 1000)
        assert (failed.value.code, failed.value.param) == (Code.INVALID_REQUEST, each.prompt_field)
    with pytest.raises(ApiError, match="64 MiB of memory, 3 times; retry in") as refused:
        await encode_prompt(request, hostile, 1000)
    assert refused.value.code is Code.NO_SERVERS
    assert refused.value.retry_after is not None
    assert refused.value.retry_after > 1.0
    assert await encode_prompt(request, other, 1000) == tuple(encode_bytes("aaaa"))
    assert hostile.chat_fault == "", "the template is not the cause"


def test_circuit_breaker_needs_failures_in_a_row_and_recloses() -> None:
    now = 0.0
    breaker = CircuitBreaker(lambda: now)
    for _ in range(MAX_FAILURES - 1):
        breaker.record_failure("failed")
    breaker.record_success()
    for _ in range(MAX_FAILURES):
        assert breaker.seconds_open < 0
        breaker.record_failure("failed")
    assert (breaker.seconds_open, breaker.reason) == (REFUSAL_SECONDS, "failed, 3 times")
    now = REFUSAL_SECONDS
    assert breaker.seconds_open <= 0
    breaker.record_failure("failed")
    assert breaker.seconds_open > 0, "one failure after the pause is enough"


async def test_large_prompt_does_not_delay_small_ones() -> None:
    """The large one would run for minutes; small ones of the same model have a worker of their own."""
    files = hostile_files(**HOSTILE["regex in the pre-tokenizer"])
    text = ModelTokenizer(files, cpu_seconds=600.0, name="evil")
    large = asyncio.create_task(text.encode(EVIL_TEXT * 2, special=False))
    assert len(EVIL_TEXT * 2) > SMALL_REQUEST_BYTES
    for _ in range(5):
        assert await text.encode("hi", special=False) == encode_bytes("hi")
    assert not large.done()
    text.close()
    with pytest.raises(ModelProcessError):
        await large


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        ({"type": "Replace", "pattern": REGEX, "content": "x"}, "Replace replaces a regular expr"),
        ({"type": "Sequence", "decoders": DOUBLINGS[:9]}, "by a longer text"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}] * (MAX_STEPS + 1)}, "has 17 steps"),
        ({"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": []}]}, "not allowed"),
        ({"type": "Strip", "content": " ", "start": 0, "stop": 3}, "strips the end"),
        ({"type": "BPEDecoder", "suffix": ""}, "empty suffix"),
    ],
)
def test_decoder_without_bound_is_refused_by_name(decoder: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFilesError, match=rf"tokenizer\.json: the decoder .*{reason}"):
        make_tokenizer(hostile_files(decoder=decoder))


def test_tokenizer_of_too_long_or_too_many_tokens_is_refused() -> None:
    model = json.loads(byte_level().to_str())["model"]
    for token, place, reason in [
        ("a" * (MAX_TOKEN_BYTES + 1), len(model["vocab"]), "has 1025 bytes"),
        ("ab", MAX_TOKEN_IDS, f"ids up to {MAX_TOKEN_IDS}; allowed"),
    ]:
        changed = model | {"vocab": model["vocab"] | {token: place}}
        with pytest.raises(ModelFilesError, match=reason):
            make_tokenizer(hostile_files(model=changed))


def test_tokenizer_that_fills_the_memory_when_loaded_is_refused() -> None:
    """Nine characters of a regular expression are compiled to some kilobytes of ranges."""
    regex = {"Regex": "[\\p{L}a]" * 600_000}
    split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: .*memory"):
        make_tokenizer(hostile_files(pre_tokenizer=split))
    assert make_tokenizer().decode(encode_bytes("hi")) == "hi"


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_table_decodes_as_the_library_does(make: Any) -> None:
    tokenizer = make()
    text = make_tokenizer(model_files() | {"tokenizer.json": tokenizer.to_str().encode()})
    for start in range(tokenizer.get_vocab_size() + 3):
        ids = [(start * step) % (tokenizer.get_vocab_size() + 9) for step in range(1, 12)]
        assert text.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert text.decode([-1, 1 << 40]) == tokenizer.decode([])


def test_model_of_too_many_end_tokens_is_refused() -> None:
    """A thousand turns with 500,000 of them would take 4 GB of a gateway."""
    for count in (MAX_END_TOKENS, MAX_END_TOKENS + 1):
        ends = json.dumps({"eos_token_id": list(range(count))}).encode()
        files = model_files() | {"generation_config.json": ends, "tokenizer_config.json": b"{}"}
        if count == MAX_END_TOKENS:
            assert len(make_tokenizer(files).defaults.eos) == count
            continue
        with pytest.raises(ModelFilesError, match="eos_token_id: 1025 end tokens; allowed"):
            make_tokenizer(files)


async def test_files_write_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The library's error repeats this text of the file."""
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    content = json.dumps({"version": "1\nforged\x1b[2J"}).encode()
    harness.send_files("s0/1/a", model_files() | {"tokenizer.json": content})
    await harness.wait_until_idle()
    [line] = [each for each in caplog.messages if "forged" in each]
    assert line.isprintable()


def test_search_for_tokens_in_a_grammar_is_bounded() -> None:
    """A text of 256 KiB took half a minute with 100,000 special tokens, and 1.6 s with the 6,415 of Gemma 3."""
    names = [f"<|s_{number}|>" for number in range(100_000)]
    table = TokenTable(
        pack_table([*names, "[INST]", "<b>"], dict.fromkeys(range(100_002), True)), None
    )
    text = f"{'[x<' * 10_000}[INST] <|s_77|><b><|s_7|>"
    assert table.tokens_within(text) == {
        "<|s_7|>": 7,
        "<|s_77|>": 77,
        "[INST]": 100_000,
        "<b>": 100_001,
    }
    with pytest.raises(ValueError, match="over 1048576 comparisons"):
        table.tokens_within("<" * (256 << 10))


async def test_tokenizers_of_all_models_share_a_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = RegistryHarness()
    needed = make_tokenizer().memory_bytes
    monkeypatch.setattr(harness.registry, "_memory", needed * 3 // 2)
    for number in range(2):
        name = f"m{number}"
        harness.registry.on_peer_connected(replace(HELLO, peer=f"s{number}/1/a", model=name))
        harness.now += 1.0
        harness.registry.tick()
        harness.send_files(f"s{number}/1/a", model_files())
        await harness.wait_until_idle()
    first, second = harness.registry.entries()
    assert first.tokenizer is not None
    assert second.tokenizer is None
    assert re.match(
        r"tokenizer\.json: the tokenizer needs \d+ MiB of memory, and \d+ of the \d+ MiB",
        second.files_problem,
    )
    await harness.registry.close()


async def test_killed_worker_is_replaced_at_the_next_request() -> None:
    before = set(children_of(os.getpid()))
    text = make_tokenizer()
    await text.encode("hi", special=False)
    (process,) = set(children_of(os.getpid())) - before
    (worker,) = children_of(process)
    os.kill(worker, signal.SIGKILL)
    with suppress(EncodeError):  # if the request was sent to the killed one
        await text.encode("hi", special=False)
    assert await text.encode("hi", special=False) == encode_bytes("hi")


async def test_lost_processes_are_started_again_from_the_servers_files() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.send_files("s0/1/a", model_files())
    assert await harness.wait_until_loaded()
    harness.take_asked_peers()
    [entry] = harness.registry.entries()
    lost = entry.tokenizer
    assert lost is not None
    lost.close()
    with pytest.raises(ModelProcessError):
        await lost.encode("hi", special=False)
    assert lost.decode(encode_bytes("hi")) == "hi", "a stream that runs needs no process"
    harness.registry.tick()
    assert harness.take_asked_peers() == ["s0/1/a"]
    harness.send_files("s0/1/a", model_files())
    assert await harness.wait_until_loaded()
    assert entry.tokenizer is not None
    assert await entry.tokenizer.encode("hi", special=False) == encode_bytes("hi")
    await harness.registry.close()
    assert not entry.tokenizer


async def test_missing_interpreter_is_no_fault_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ModelProcessError, match="No such file"):
        make_tokenizer()


def test_environment_of_the_processes_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    environment = child_environment()
    assert "HF_TOKEN" not in environment
    assert environment["TZ"] == "Asia/Tokyo"


@pytest.mark.parametrize("end", ["kill", "terminate", "exit"])
def test_processes_end_with_their_gateway(end: str) -> None:
    """The gateway is a script here; a worker computes for minutes when the gateway ends."""
    script = (
        "import asyncio, sys\n"
        "from support.models.tokenizers import model_files\n"
        "from modelswarm_gateway.models.tokenizer import ModelTokenizer\n"
        "ranges = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'\n"
        "async def main():\n"
        "    text = ModelTokenizer(model_files(template=ranges), cpu_seconds=600, name='toy')\n"
        "    task = asyncio.create_task(text.encode_chat([]))\n"
        "    await asyncio.sleep(0.1)\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.to_thread(sys.stdin.read)\n"
        "    text.close()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as gateway:
        assert gateway.stdout is not None
        assert gateway.stdin is not None
        assert gateway.stdout.readline() == b"ready\n"
        (process,) = children_of(gateway.pid)
        eventually("the worker", lambda: len(children_of(process)) == 1)
        processes = {process, *children_of(process)}
        if end == "exit":
            gateway.stdin.close()
        else:
            getattr(gateway, end)()
        gateway.wait(SECONDS)
    eventually("the end of all processes", lambda: not processes & set(running_processes()))


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process takes orphans in")
def test_first_process_of_a_container_keeps_no_dead_worker() -> None:
    """Each would hold an entry of the process table until the gateway ends."""
    script = (
        "import asyncio, ctypes, os\n"
        "from support.models.tokenizers import make_tokenizer\n"
        "ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans are its own, as for process 1\n"
        "text = make_tokenizer()\n"
        "asyncio.run(text.encode('hi', special=False))\n"
        "text.close()\n"
        "try:\n"
        "    print(os.waitpid(-1, 0))\n"
        "except ChildProcessError:\n"
        "    print('none')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environment,
    )
    assert ended.stdout == "none\n", ended.stderr


def children_of(pid: int) -> list[int]:
    return [child for child, parent in running_processes().items() if parent == pid]


def running_processes() -> dict[int, int]:
    """Return the parent of each process, without unreaped ones."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(stat.parent.name)] = int(parent)
    return found
