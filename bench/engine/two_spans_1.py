"""One stream over two span processes, against `generate` of the whole model in one process."""

from __future__ import annotations

from bench.engine.against_generate import compare_with_generate
from bench.harness import Result


def run() -> Result:
    return compare_with_generate("two_spans_1", streams=1, bars={"27m": 1.1, "246m": 1.1})
