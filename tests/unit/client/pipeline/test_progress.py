"""The progress bar, and the imports of the pipeline."""

from __future__ import annotations

import subprocess
import sys

import pytest

from modelswarm.client.pipeline.progress import progress_bar
from modelswarm.errors import UserError


def test_progress_bar_counts_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(4, 1, True) as advance:
        for _ in range(3):
            advance()

    assert "4/4" in capsys.readouterr().err


def test_missing_tqdm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)

    with progress_bar(4, 0, False) as advance:
        advance()
    with pytest.raises(UserError, match="pip install tqdm") as caught, progress_bar(4, 0, True):
        pass

    assert caught.value.field == "use_tqdm"


def test_pipeline_imports_no_heavy_library() -> None:
    program = """
import sys
from modelswarm import GenerationConfig, Pipeline, PipelineInterrupted, Response, pipeline
heavy = {"torch", "transformers", "grpc", "pydantic", "tqdm", "yaml", "numpy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
