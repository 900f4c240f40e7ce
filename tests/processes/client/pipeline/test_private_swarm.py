"""`pipeline("path")`: a private swarm of child processes, which ends with the pipeline and with its process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.eventually import eventually
from support.processes.streams import ANSWER_SECONDS

from modelswarm import GenerationConfig, pipeline
from modelswarm.errors import UnreachableError, UserError

PROGRAM = """
import json, sys, time
from modelswarm import GenerationConfig, pipeline

pipe = pipeline(sys.argv[1], spans=int(sys.argv[3]), threads=1)
text = pipe("Hi", GenerationConfig(max_new_tokens=5, ignore_eos=True)).text
jobs = [server.job_status for server in pipe.swarm.servers] + list(pipe.swarm.gateways)
print(json.dumps([text, [job.pid for job in jobs]]), flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # also if it ends while it is read
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("end", "spans"), [("wait", 1), pytest.param("exit", 2, marks=pytest.mark.full)]
)
def test_private_swarm_ends_with_its_process(toy_folder: Path, end: str, spans: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(toy_folder), end, str(spans)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        text, pids = json.loads(process.stdout.readline())
        if end == "wait":
            assert all(map(is_alive, pids))
            process.send_signal(signal.SIGKILL)
        code = process.wait(ANSWER_SECONDS)

    assert code == (0 if end == "exit" else -signal.SIGKILL)
    assert text
    assert len(pids) == spans + 1
    eventually("its processes have ended", lambda: not any(map(is_alive, pids)))


@pytest.mark.full
def test_private_swarm_ends_with_its_pipeline(toy_folder: Path) -> None:
    config = GenerationConfig(max_new_tokens=5, ignore_eos=True)
    with pipeline(str(toy_folder), spans=2, session_len=100, max_batch_size=2, threads=1) as pipe:
        assert pipe.swarm is not None
        pids = [server.job_status.pid for server in pipe.swarm.servers]
        responses = pipe([f"prompt {place}" for place in range(5)], config)
        assert pipe.swarm.plan.max_length == 100
        assert pipe.swarm.plan.full_sessions >= 2

    assert [response.generate_token_len for response in responses] == [5] * 5
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model_path": "/no/such/folder"}, "model_path"),
        ({"model_path": "file:///no/such/folder"}, "model_path"),
        ({"spans": 0}, "spans"),
        ({"spans": 99}, "spans"),
        ({"replicas": 0}, "replicas"),
        ({"session_len": 1_000_000}, "session_len"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"dtype": "int8"}, "dtype"),
        ({"memory": "much"}, "memory"),
        ({"memory": "10Ki"}, "memory"),
        ({"api_key": "x"}, "api_key"),
        ({"model": "x"}, "model"),
        ({"model": "x", "adapters": {}}, "model"),
        ({"adapters": ["/x"]}, "adapters"),
        ({"max_lora_rank": 8}, "max_lora_rank"),
        ({"adapters": {"law": "demo://counting"}, "max_lora_rank": 513}, "max_lora_rank"),
        ({"adapters": {"law": 5}}, "adapters"),
        ({"adapters": {"law": "/no/such/folder"}}, "adapters"),
        ({"adapters": {"-x": "demo://x"}}, "adapters"),
        ({"session_len": 10**9}, "session_len"),
        ({"timeout": 0}, "timeout"),
        ({"backend_config": object()}, "backend_config"),
        ({"tp": 2}, "tp"),
        ({"span": 2}, "span"),
        ({"model_path": "http://127.0.0.1:1", "spans": 2}, "spans"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_argument_is_refused_before_a_start(
    toy_folder: Path, options: dict[str, object], field: str
) -> None:
    arguments: dict[str, object] = {"model_path": str(toy_folder), **options}

    with pytest.raises(UserError) as caught:
        pipeline(**arguments)  # type: ignore[arg-type]

    assert caught.value.field == field


def test_gateway_that_does_not_answer_is_refused() -> None:
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
        pipeline("http://127.0.0.1:1")
