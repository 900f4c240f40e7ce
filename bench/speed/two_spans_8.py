"""Eight streams over two span processes, total tokens/s against `generate` with batch 8 in one process."""

from __future__ import annotations

from bench.harness import Result
from bench.speed.against_generate import compare_with_generate


def run() -> Result:
    return compare_with_generate("two_spans_8", streams=8, bar=1.0)
