"""The GPU benchmark: one sentence without a GPU, and a correctness check that sees wrong tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.chain import OPTIONS
from support.models.tiny_models import load_whole, make_model

from bench.__main__ import NAMES
from bench.gpu import correctness, report
from bench.gpu.speed import kv_bytes, weight_bytes
from bench.models import Shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark would run")
def test_benchmark_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert NAMES["gpu"] == report.__name__
    assert report.run() is None
    assert capsys.readouterr().out == (
        "gpu: not run, because torch sees no CUDA device on this machine\n"
    )


def test_markdown_table_has_a_row_per_result() -> None:
    table = report.markdown([("hop", "one stream", "1 ms", "", "")]).splitlines()
    assert table[0] == "| part | case | measured | limit | share |"
    assert table[2] == "| hop | one stream | 1 ms |  |  |"


def test_correctness_check_passes_right_tokens() -> None:
    options = replace(OPTIONS, dtype="float16")
    tally = correctness.check_family("llama", options, correctness.TOLERANCES["float16"])
    assert tally.tokens == 2 * len(correctness.PROMPTS) * correctness.NEW
    assert tally.wrong == 0
    assert tally.near_ties < tally.tokens // 10


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
