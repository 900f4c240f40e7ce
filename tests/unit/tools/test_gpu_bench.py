"""The GPU benchmark: one sentence without a GPU, and a correctness check that sees wrong tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.chain import OPTIONS
from support.models.tiny_models import load_whole, make_model
from support.processes.programs.gpu_jobs import die, hang
from typing_extensions import override

from bench.__main__ import NAMES
from bench.gpu import correctness, report
from bench.gpu.__main__ import ROOT, main
from bench.gpu.report import Table, run_parts
from bench.gpu.speed import kv_bytes, lacks_graphs, weight_bytes
from bench.models import Shape
from modelswarm_serving.model.transformer.startup import load_span


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark would run")
def test_benchmark_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert NAMES["gpu"] == report.__name__
    assert report.run() is None
    assert main(["decode"]) == 0
    assert capsys.readouterr().out == (
        "gpu: not run, because torch sees no CUDA device on this machine\n" * 2
    )


def test_checkout_that_is_not_installed_finds_its_parts() -> None:
    """`-S` hides the installation, and `-P` the current folder, as for servers."""
    servers = "import modelswarm, modelswarm_gateway, modelswarm_serving"
    code = f"""
import subprocess, sys
from bench.gpu.__main__ import use_checkout
use_checkout()
import support.models.tiny_models
{servers}
subprocess.run([sys.executable, "-S", "-P", "-c", "{servers}"], check=True)
"""
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, env=environment, check=True)


def test_markdown_table_has_a_row_per_result() -> None:
    table = report.markdown([("hop", "one stream", "1 ms", "", "")]).splitlines()
    assert table[0] == "| part | case | measured | limit | share |"
    assert table[2] == "| hop | one stream | 1 ms |  |  |"


def test_unknown_part_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["decode", "speed"])
    assert (
        "unknown part 'speed'; allowed: correctness, decode, prefill, memory, hop, kill, correctness-rest"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_limit_without_time_is_refused(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--minutes", minutes, "decode"])
    assert f"--minutes: {minutes} is no time" in capsys.readouterr().err


def test_stopped_run_has_told_the_rows_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(table: Table) -> None:
        assert "| hop | one stream | 1 ms |  |  |\n" in capsys.readouterr().out
        raise KeyboardInterrupt

    monkeypatch.setenv("OUT", str(tmp_path))
    parts = {"hop": lambda table: table.add("hop", "one stream", "1 ms", "", ""), "kill": stop}
    with pytest.raises(KeyboardInterrupt):
        run_parts(parts, Table())
    for text in (capsys.readouterr().out, (tmp_path / "gpu.txt").read_text()):
        assert text.startswith("| part | case | measured | limit | share |\n")
        assert "| hop | one stream | 1 ms |  |  |\n| hop | the whole part | 0 s |" in text


def test_part_that_fails_leaves_the_others() -> None:
    table = Table()
    missing = report._part("one", "nothing", "measure")
    run_parts({"one": missing, "two": lambda table: table.add("two", "", "", "", "")}, table)
    assert table.rows[0][2].startswith("failed: ModuleNotFoundError: No module named")
    assert ("two", "", "", "", "") in table.rows
    assert table.figures == {"failed": 1.0}


def test_process_that_dies_leaves_the_others() -> None:
    """As after a fault of a kernel that the driver answers with an abort."""
    table = Table()
    report.run_apart("one", "all", die, table)
    assert table.rows[0] == ("one", "begun", "", "", "")
    assert table.rows[1][2] == "failed: its process ended with exit code -9"
    assert table.figures == {"failed": 1.0}


class ShortTable(Table):
    """A table whose time is over once a row came."""

    @override
    def add(self, *row: str) -> None:
        super().add(*row)
        self.deadline = time.monotonic()


def test_part_that_hangs_is_stopped_at_the_deadline() -> None:
    table = ShortTable(deadline=time.monotonic() + 3600)
    report.run_apart("one", "all", hang, table)
    report.run_apart("two", "all", hang, table)
    assert table.rows == [
        ("one", "begun", "", "", ""),
        ("one", "all", "failed: stopped, because no time is left", "", ""),
        ("two", "all", "not run: no time is left", "", ""),
    ]
    assert table.figures == {"failed": 1.0, "begun": 1.0}


def test_family_that_fails_leaves_the_others() -> None:
    table = Table()
    for family in ("unknown", "llama"):
        correctness.add_family(table, family, replace(OPTIONS, dtype="float16"))
    failed, checked = table.rows
    assert failed[:3] == ("correctness", "unknown float16", "failed: KeyError: 'unknown'")
    assert checked[1] == "llama float16"
    assert "0 wrong" in checked[2]
    assert (table.figures["failed"], table.figures["wrong"]) == (1, 0)


def test_correctness_check_passes_right_tokens() -> None:
    options = replace(OPTIONS, dtype="float16")
    tally = correctness.check_family("llama", options, correctness.TOLERANCES["float16"])
    assert tally.tokens == 2 * len(correctness.PROMPTS) * correctness.NEW
    assert tally.wrong == 0
    assert tally.near_ties < tally.tokens // 10


def test_wrong_tokens_of_other_experts_are_allowed() -> None:
    """transformers' own forward has them on a CPU: the router of a mixture decides near ties by rounding."""
    options = replace(OPTIONS, dtype="bfloat16")
    tally = correctness.check_family("gpt_oss", options, correctness.TOLERANCES["bfloat16"])
    assert tally.wrong > 0
    assert tally.usual > 0
    assert tally.excess == 0
    for wrong in (3 * tally.usual + 3, 3 * tally.usual + 4):
        assert replace(tally, wrong=wrong).excess == (wrong > 3 * tally.usual + 3)
    assert replace(tally, may_flip=False).excess == tally.wrong


def test_span_without_captured_steps_is_noticed(tmp_path: Path) -> None:
    """A start only warns of it, and the rows would name graphs that never ran."""
    span = load_span(make_model(tmp_path), 0, 4, OPTIONS)
    triton = replace(OPTIONS, attention_backend="triton")
    assert lacks_graphs(span, triton)
    assert not lacks_graphs(span, OPTIONS)
    assert not lacks_graphs(span, replace(triton, enforce_eager=True))


def test_correctness_check_sees_wrong_tokens(tmp_path: Path) -> None:
    model = load_whole(make_model(tmp_path))
    tally = correctness.Tally()
    correctness.judge(model, list(range(1, 40)), 30, 1e-3, tally)
    assert tally.tokens == 30
    assert tally.wrong > 20


def test_roofline_bytes_are_those_of_the_model(tmp_path: Path) -> None:
    shape = Shape("small", 64, 4, 4, 2, 96, 320)
    model = load_whole(make_model(tmp_path))
    weights = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    assert weight_bytes(shape) == 2 * (weights - 320 * 64)  # the embedding is not read
    assert kv_bytes(shape) == 2 * 2 * 4 * 2 * 16
