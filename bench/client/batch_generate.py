"""The baseline of `pipeline_256`: Hugging Face `generate` over batches of prompts of about the same length.

A child process with the whole model. It reads a line with the prompts and the tokens to generate, as JSON, and writes a
line with the seconds. A batch generates as many tokens as its longest answer needs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.timed_process import TimedProcess

BATCH = 8


class BatchGenerate(TimedProcess):
    """The process: `with BatchGenerate(folder, threads) as local: local.time_prompts(prompts, new)`."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__("bench.client.batch_generate", str(folder), str(threads))

    def time_prompts(self, prompts: Sequence[Sequence[int]], new: Sequence[int]) -> float:
        """Return the seconds for all prompts, each a list of token ids; `new`: tokens to generate for each."""
        return self.time_task(json.dumps([list(map(list, prompts)), list(new)]))


def sorted_batches(prompts: Sequence[Sequence[int]], new: Sequence[int]) -> list[list[int]]:
    """Return batches of indexes, sorted by answer and prompt length, so that little is computed for padding."""
    order = sorted(range(len(prompts)), key=lambda place: (new[place], len(prompts[place])))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def serve(folder: str, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    for line in sys.stdin:
        prompts, new = json.loads(line)
        began = time.perf_counter()
        for batch in sorted_batches(prompts, new):
            longest = max(len(prompts[place]) for place in batch)
            rows = [[0] * (longest - len(prompts[place])) + prompts[place] for place in batch]
            masks = [
                [0] * (longest - len(prompts[place])) + [1] * len(prompts[place]) for place in batch
            ]
            count = max(new[place] for place in batch)
            with torch.inference_mode():
                model.generate(
                    torch.tensor(rows),
                    attention_mask=torch.tensor(masks),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
