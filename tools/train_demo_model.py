"""Train the small counting model that ModelSwarm ships as its demo.

    python tools/train_demo_model.py --out modelswarm/demo/counting

Writes a Hugging Face folder: a LlamaForCausalLM of 8 blocks and 1.6 M parameters, one token per
byte, and a chat template. The lessons are in `demo_model/lessons.py`, the rows in
`demo_model/packing.py`, the exam in `demo_model/exam.py`. Rows and initial weights follow from the
seed. Sums over several threads may differ in the last bit, so another machine gets similar weights,
not the same ones.

The shipped weights were made by this command with its defaults: one run of 5000 steps, 19 million
tokens. It took 26 minutes on two free cores of a Sapphire Rapids Xeon (12 000 tokens a second). The
exam is printed at the end; the shipped weights answered every question but one count beyond 300.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo_model.exam import Exam, format_marks
from tools.demo_model.packing import IGNORED, Chat, make_long_row, make_short_row
from tools.demo_model.text import BEGIN, CONTEXT, END, PAD, VOCABULARY, write_tokenizer

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    steps: int = 5000
    peak_rate: float = 2e-3
    warmup: int = 60
    decay_from: float = 0.6
    seed: int = 20
    first_step: int = 0
    threads: int = 2
    exam_every: int = 250

    def learning_rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, constant, then a linear decay to a hundredth."""
        if step - self.first_step < self.warmup:
            return self.peak_rate * (step - self.first_step + 1) / self.warmup
        done = step / self.steps
        if done < self.decay_from:
            return self.peak_rate
        return self.peak_rate * max(0.01, (1 - done) / (1 - self.decay_from))

    def batch_shape(self, step: int, rng: Random) -> tuple[int, int, bool]:
        """Return (rows, length, is long) of a step's batch: short rows first, whole counts later."""
        done = step / self.steps
        if done < 0.1:
            return 32, 128, False
        if rng.random() < (0.2 if done < 0.3 else 0.4):
            return 3, 1280, True
        return 16, 256, False


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config)


def to_batch(chats: list[Chat], length: int) -> Batch:
    """Return ids, positions and targets shifted by one, each [rows, length]."""
    ids = torch.tensor([chat.ids[:length] for chat in chats])
    positions = torch.tensor([chat.positions[:length] for chat in chats])
    targets = torch.tensor([[*chat.targets, IGNORED][1 : length + 1] for chat in chats])
    return ids, positions, targets


def make_batches(recipe: TrainingSettings) -> Iterator[Batch]:
    rng = Random(recipe.seed + recipe.first_step)
    for step in range(recipe.first_step, recipe.steps):
        rows, length, is_long = recipe.batch_shape(step, rng)
        write = make_long_row if is_long else make_short_row
        yield to_batch([write(rng, length) for _ in range(rows)], length)


def compute_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    ids, positions, targets = batch
    # The mask marks one text: without it, transformers takes a jump in the positions for a boundary.
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
        ).logits
    # The end token is rare and hard to learn, most of all a thousand tokens after the question.
    weights = torch.full((VOCABULARY,), 4.0 if ids.shape[1] > 512 else 1.0)
    weights[END] *= 2.0
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), weight=weights, reduction="sum"
    )
    return losses / (targets != IGNORED).sum()


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10)


def train(recipe: TrainingSettings, scratch: Path, resumed: Path | None = None) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    model = LlamaForCausalLM.from_pretrained(resumed) if resumed else make_model()
    print(f"{model.num_parameters()} parameters", flush=True)
    optimizer, exam = make_optimizer(model), Exam(Random(recipe.seed + 1))
    began, total = time.monotonic(), 0.0
    for step, batch in enumerate(make_batches(recipe), recipe.first_step):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        loss = compute_loss(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - began
            print(f"step {step + 1} loss {total / 50:.5f} after {seconds:.0f} s", flush=True)
            total = 0.0
        if (step + 1) % recipe.exam_every == 0:
            print(format_marks(exam.grade(model)), flush=True)
            save(model, scratch)
    return model


def save(model: LlamaForCausalLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD, do_sample=False
    )
    model.save_pretrained(folder, max_shard_size="3MB")
    write_tokenizer(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    usual = TrainingSettings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/train/last"))
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--threads", type=int, default=usual.threads)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--resume", type=Path, help="continue from this folder, at --first-step")
    parser.add_argument("--first-step", type=int, default=usual.first_step)
    given = parser.parse_args()
    recipe = TrainingSettings(
        steps=given.steps, threads=given.threads, seed=given.seed, first_step=given.first_step
    )
    save(train(recipe, given.scratch, given.resume), given.out)


if __name__ == "__main__":
    main()
