"""The baseline: Hugging Face `generate` of the whole model in one process with one torch thread.

A child process controlled over its standard streams, so that a benchmark can interleave it with the swarm. It reads a
line `batch prompt new` and writes a line with the seconds. Used by `against_generate`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch


class LocalGenerate:
    """The process of `generate`: `with LocalGenerate(folder) as local: local.time_generate(...)`."""

    def __init__(self, folder: Path, threads: int = 1, dtype: str = "float32") -> None:
        module = "bench.engine.local_generate"
        command = [sys.executable, "-m", module, str(folder), str(threads), dtype]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def time_generate(self, *, batch: int, prompt: int, new: int) -> float:
        """Return the seconds of `generate`, with prefill."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{batch} {prompt} {new}\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._child.kill()
        self._child.communicate()


def serve(folder: str, threads: int, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    generator = torch.Generator().manual_seed(1)
    for line in sys.stdin:
        batch, prompt, new = map(int, line.split())
        ids = torch.randint(1, model.config.vocab_size, (batch, prompt), generator=generator)
        print(time_tokens(model, ids, new), flush=True)


def time_tokens(model: Any, ids: torch.Tensor, new: int) -> float:
    """Return the seconds of `generate` for so many greedy tokens after each of the prompts [batch, length]."""
    import torch

    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
    seconds = time.perf_counter() - began
    made = out.shape[1] - ids.shape[1]
    if made != new:
        raise RuntimeError(f"generate made {made} tokens, not {new}")
    return seconds


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
