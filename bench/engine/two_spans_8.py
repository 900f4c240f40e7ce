"""Eight streams over two span processes, total tokens/s against `generate` with batch 8 in one process."""

from __future__ import annotations

from bench.engine.against_generate import compare_with_generate
from bench.harness import Result


def run() -> Result:
    return compare_with_generate("two_spans_8", streams=8, bars={"27m": 1.3, "246m": 1.1})
