"""Threads and device of a server process: those of its flags are in use, or it exits with one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from support.eventually import eventually
from support.models.tiny_models import make_model
from support.processes.server import command, refusal, servers

from modelswarm.errors import DeviceError

_ENGINE_THREAD = """
import os, sys, threading
import torch
from pathlib import Path
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span
span = load_span(Path(sys.argv[1]), 0, 2, SpanOptions(threads=1, pages=8))
def run():
    span.prepare_thread()
    before = len(os.listdir("/proc/self/task"))
    torch.randn(1024, 1024) @ torch.randn(1024, 1024)
    print(len(os.listdir("/proc/self/task")) - before)
thread = threading.Thread(target=run)
thread.start()
thread.join()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.full
def test_engine_thread_starts_no_more_threads(tmp_path: Path) -> None:
    """Torch keeps the number per thread; a new one multiplies matrices on all CPUs."""
    environment = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key}
    folder = str(make_model(tmp_path))
    program = [sys.executable, "-c", _ENGINE_THREAD, folder]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["0"], done.stderr


async def test_hardware_and_attention_in_use_are_metrics(tmp_path: Path) -> None:
    flags = ("--model", "demo://counting", "--pages", "8", "--metrics", "127.0.0.1:0")
    chosen = ("--threads", "3", "--weight-layout", "plain")
    async with servers(tmp_path, ["0:1"], *flags, *chosen) as (server,):

        def shown() -> str:
            with urllib.request.urlopen(f"http://{server.member['metrics']}/metrics") as page:
                return str(page.read().decode())

        sample = 'modelswarm_server_threads{blocks="0:1",model="counting"} 3.0'
        eventually("the metric is shown", lambda: sample in shown())
        for label in ('layout="plain"', 'attention="sdpa"', 'decode_graphs="false"'):
            assert label in shown()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
async def test_server_without_its_device_exits_with_a_sentence(tmp_path: Path) -> None:
    """It never computes on the CPU instead."""
    flags = ("--model", "demo://counting", "--device", "cuda")
    code, stderr = await refusal(*command(tmp_path, "s", "0:1", *flags))
    assert code == DeviceError.exit_code
    assert stderr.splitlines()[-1].startswith("modelswarm-server: --device: cuda is not there: ")
    assert "Traceback" not in stderr


@pytest.mark.full
async def test_backend_that_cannot_run_exits_with_a_sentence(tmp_path: Path) -> None:
    flags = ("--model", "demo://counting", "--device", "cpu", "--attention-backend", "triton")
    code, stderr = await refusal(*command(tmp_path, "s", "0:1", *flags))
    assert code == DeviceError.exit_code
    assert stderr.splitlines()[-1] == (
        "modelswarm-server: --attention-backend: triton cannot run on cpu: its kernels are for CUDA and ROCm; "
        "allowed here: auto or sdpa"
    )
    assert "Traceback" not in stderr
