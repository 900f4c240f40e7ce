"""`modelswarm batch` against a real swarm: its answers, interrupted and killed runs, a killed gateway and server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.processes.programs.terminal import Terminal
from support.processes.swarm import MODEL, Endpoints, HashSwarm

pytestmark = pytest.mark.full

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
SHORT, LONG = 5, 400  # tokens of an answer
URLS = {"text": "/v1/completions", "chat": "/v1/chat/completions", "response": "/v1/responses"}


def request(kind: str, number: int, tokens: int, **fields: Any) -> dict[str, Any]:
    prompts: dict[str, dict[str, Any]] = {
        "text": {"prompt": f"count {number}", "max_tokens": tokens, "ignore_eos": True},
        "chat": {
            "messages": [{"role": "user", "content": f"count {number}"}],
            "max_tokens": tokens,
            "ignore_eos": True,
        },
        "response": {"input": f"count {number}", "max_output_tokens": tokens},
    }
    body = {"model": MODEL, "temperature": 0, **prompts[kind], **fields}
    custom_id = f"{kind}-{number}"
    return {"custom_id": custom_id, "method": "POST", "url": URLS[kind], "body": body}


def write_input(path: Path, requests: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests), encoding="utf-8")
    return path


def command(gateway: Endpoints, source: Path, target: Path, *flags: str) -> tuple[str, ...]:
    return ("batch", str(source), "-o", str(target), "--url", gateway.url, *flags)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, "-m", "modelswarm.cli", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*arguments: str) -> tuple[int, str, str]:
    """Run a command; return its exit code and both outputs."""
    with start(*arguments) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def lines(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in target.read_bytes().splitlines()]


def texts(target: Path) -> dict[str, str]:
    """Return the texts of text completions by custom_id. Each line must be there once, with status 200."""
    read = lines(target)
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in read}
    assert len(found) == len(read)
    assert {line["response"]["status_code"] for line in read} == {200}
    return found


def wait_lines(target: Path, count: int) -> None:
    eventually(
        f"{count} lines are written",
        lambda: target.exists() and target.read_bytes().count(b"\n") >= count,
    )


def test_answers_are_those_of_the_same_requests(gateway: Endpoints, tmp_path: Path) -> None:
    requests = [request(kind, number, SHORT) for number in range(4) for kind in URLS]
    source = write_input(tmp_path / "in.jsonl", requests)
    target = tmp_path / "out.jsonl"

    code, out, err = finish(*command(gateway, source, target, "--json"))

    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert summary.pop("seconds") > 0
    assert summary == {
        "output": str(target), "total": 12, "ok": 12, "failed": 0, "done_before": 0
    }  # fmt: skip
    answers = {line["custom_id"]: line["response"] for line in lines(target)}
    for each in requests:
        direct = httpx.post(f"{gateway.url}{each['url']}", json=each["body"], timeout=60).json()
        answer = answers.pop(each["custom_id"])
        assert answer["status_code"] == 200 and answer["request_id"]
        assert set(answer["body"]) == set(direct)
        for part in ("choices", "usage"):
            assert answer["body"].get(part) == direct.get(part)
    assert answers == {}


def test_refused_lines_are_answers_and_exit_code_1(gateway: Endpoints, tmp_path: Path) -> None:
    requests = [
        request("text", 0, SHORT),
        request("text", 1, SHORT, temprature=1),
        request("chat", 2, -1),
    ]
    source = write_input(tmp_path / "in.jsonl", requests)
    target = tmp_path / "out.jsonl"

    code, out, err = finish(*command(gateway, source, target))

    assert code == 1
    assert f"3 lines in {target}: 1 answered, 2 failed; " in out
    assert err == "--retry-failed runs the failed lines again\n"
    by_id = {line["custom_id"]: line for line in lines(target)}
    told = by_id["text-1"]["response"]
    assert (told["status_code"], by_id["text-1"]["error"]) == (400, None)
    assert told["body"]["error"]["param"] == "temprature"

    before = target.read_bytes()
    assert finish(*command(gateway, source, target))[0] == 1
    assert target.read_bytes() == before, "a line that failed is an answer too"
    code, _, err = finish(*command(gateway, source, target, "--retry-failed", "--model", "nope"))
    assert (code, "nope" in err) == (2, True), err
    assert target.read_bytes() == before, "no request was run again"


def test_model_that_is_not_served_is_refused_by_its_line(
    gateway: Endpoints, tmp_path: Path
) -> None:
    requests = [request("text", 0, SHORT), request("text", 1, SHORT, model="hsah")]
    source = write_input(tmp_path / "in.jsonl", requests)

    code, _, err = finish(*command(gateway, source, tmp_path / "out.jsonl"))

    sentence = f"line 2: body.model: 'hsah' is not served here; known are: {MODEL}"
    assert (code, err) == (2, f"Error: {source}, {sentence}\n")
    assert not (tmp_path / "out.jsonl").exists()


def test_port_that_is_no_gateway_is_explained(gateway: Endpoints, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", [request("text", 0, SHORT)])
    flags = ("-o", str(tmp_path / "out"), "--url", f"http://{gateway.metrics}")

    code, _, err = finish("batch", str(source), *flags)

    assert code == 1
    assert " is a metrics port; allowed: the gateway's HTTP port" in err


def test_killed_run_goes_on_without_a_line_twice(gateway: Endpoints, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", [request("text", n, LONG) for n in range(24)])
    target, calm = tmp_path / "out.jsonl", tmp_path / "calm.jsonl"
    assert finish(*command(gateway, source, calm))[0] == 0
    for count in (3, 9):
        with start(*command(gateway, source, target, "--concurrency", "2")) as process:
            wait_lines(target, count)
            process.kill()
    whole = target.read_bytes()[: target.read_bytes().rindex(b"\n") + 1]
    target.write_bytes(whole + whole[:50])  # as a crash of the machine may leave it

    code, out, _ = finish(*command(gateway, source, target))

    assert code == 0
    earlier = len(whole.splitlines())
    assert f", {earlier} of them by an earlier run: 24 answered, 0 failed" in out
    assert target.read_bytes().startswith(whole)
    assert texts(target) == texts(calm)


def test_interrupted_run_says_what_is_done(gateway: Endpoints, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", [request("text", n, LONG) for n in range(24)])
    target = tmp_path / "out.jsonl"
    with start(*command(gateway, source, target, "--concurrency", "2")) as process:
        wait_lines(target, 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)

    done = len(lines(target))
    assert process.returncode == 130
    assert err.rstrip() == (
        f"interrupted: {done} of 24 lines are in {target}; the same command goes on from there"
    )
    assert finish(*command(gateway, source, target))[0] == 0
    assert len(texts(target)) == 24


def test_terminal_shows_a_bar_and_the_summary(gateway: Endpoints, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", [request("text", n, SHORT) for n in range(5)])
    arguments = command(gateway, source, tmp_path / "out.jsonl")
    with Terminal(arguments, {}, width=100) as terminal:
        terminal.wait_for("5/5")
        terminal.wait_for("5 answered, 0 failed; ")
        assert terminal.wait_end() == 0


def test_killed_server_and_gateway_cost_no_line(
    swarm: HashSwarm, gateway: Endpoints, tmp_path: Path
) -> None:
    source = write_input(tmp_path / "in.jsonl", [request("text", n, LONG) for n in range(32)])
    target, calm = tmp_path / "out.jsonl", tmp_path / "calm.jsonl"
    assert finish(*command(gateway, source, calm))[0] == 0
    with start(*command(gateway, source, target, "--concurrency", "4")) as process:
        wait_lines(target, 4)
        swarm.server("s1b", "2:4")
        swarm.servers_ready("s1b")
        swarm.kill("s1")
        wait_lines(target, 12)
        swarm.kill("gateway")
        swarm.gateway("--http", gateway.http)
        out, err = process.communicate(timeout=300)

    assert (process.returncode, err) == (0, ""), out
    assert texts(target) == texts(calm)


def test_example_of_the_page_runs(gateway: Endpoints, tmp_path: Path) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Batches\n")[2]
    example = re.findall(r"```(?:json|text)\n(.*?)```", section, re.DOTALL)
    source = tmp_path / "requests.jsonl"
    source.write_text(example[0], encoding="utf-8")
    line = example[1].strip().split()
    assert line[:2] == ["modelswarm", "batch"]

    done = subprocess.run(
        (sys.executable, "-m", "modelswarm.cli", *line[1:], "--url", gateway.url),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    shown, [first, *_] = json.loads(example[2]), lines(tmp_path / "answers.jsonl")
    assert set(shown) == set(first) and set(shown["response"]) == set(first["response"])
