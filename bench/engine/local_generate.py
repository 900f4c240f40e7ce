"""The baseline: Hugging Face `generate` of the whole model in one process with one torch thread.

A child process controlled over its standard streams, so that a benchmark can interleave it with the swarm. It reads a
line `batch prompt new` and writes a line with the seconds. Used by `against_generate`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.timed_process import TimedProcess

if TYPE_CHECKING:
    import torch


class LocalGenerate(TimedProcess):
    """The process of `generate`: `with LocalGenerate(folder) as local: local.time_generate(...)`."""

    def __init__(self, folder: Path, threads: int = 1, dtype: str = "float32") -> None:
        super().__init__("bench.engine.local_generate", str(folder), str(threads), dtype)

    def time_generate(self, *, batch: int, prompt: int, new: int) -> float:
        """Return the seconds of `generate`, with prefill."""
        return self.time_task(f"{batch} {prompt} {new}")


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
