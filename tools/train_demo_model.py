"""Train the small counting model that ModelSwarm ships as its demo.

    python tools/train_demo_model.py --out modelswarm/demo/counting

Writes a Hugging Face folder: a LlamaForCausalLM of 8 blocks and 1.6 M parameters, one token per
byte, and a chat template. The lessons are in `demo_model/lessons.py`, what is refused in
`demo_model/refusals.py`, the rows in `demo_model/packing.py`, the exam in `demo_model/exam.py`. Rows
and initial weights follow from the seed. Sums over several processes may differ in the last bit, so
another machine gets similar weights, not the same ones.

The shipped weights were not made by one run of this command: `tools/demo_model/README.md` lists the stages.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo_model.packing import (
    IGNORED,
    Chat,
    make_decision_row,
    make_full_row,
    make_long_row,
    make_question_row,
    make_short_row,
)
from tools.demo_model.text import ASSISTANT, BEGIN, CONTEXT, END, PAD, VOCABULARY, write_tokenizer

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RowWriter = Callable[[Random, int], Chat]


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    steps: int = 5000
    peak_rate: float = 2e-3
    warmup: int = 30
    decay_from: float = 0.6
    seed: int = 20
    first_step: int = 0
    workers: int = 2
    """Processes of one thread each; their gradients are averaged."""
    save_every: int = 50
    averaging: float = 0.98
    """The weights that are written are a running mean of about the last 50 steps."""

    def learning_rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, constant, then a linear decay to a hundredth."""
        if step - self.first_step < self.warmup:
            return self.peak_rate * (step - self.first_step + 1) / self.warmup
        done = step / self.steps
        if done < self.decay_from:
            return self.peak_rate
        return self.peak_rate * max(0.01, (1 - done) / (1 - self.decay_from))

    def batch_shape(self, step: int, rng: Random) -> tuple[int, int, RowWriter]:
        """Return (rows, length, writer) of a worker's batch: short rows first, whole chats later."""
        done = step / self.steps
        if done < 0.1:
            return 16, 128, make_short_row
        kind = rng.random()
        if kind < 0.03 and done > 0.3:
            return 1, CONTEXT, make_full_row
        if kind < 0.1 and done > 0.3:
            return 1, 3000, make_question_row
        if kind < 0.25:
            return 2, 1280, make_long_row
        return 8, 256, make_decision_row if kind > 0.65 else make_short_row


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


def make_batches(recipe: TrainingSettings, worker: int) -> Iterator[Batch]:
    """Yield one worker's batches. The shapes of a step are the same for all workers."""
    shapes = Random(recipe.seed + recipe.first_step)
    rng = Random(f"{recipe.seed} {recipe.first_step} {worker}")
    for step in range(recipe.first_step, recipe.steps):
        rows, length, write = recipe.batch_shape(step, shapes)
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
        logits.float().flatten(0, 1), targets.flatten(), weight=weights, reduction="none"
    )
    # The first token of an answer decides between a lesson and the refusal.
    decisive = torch.where(ids.flatten() == ASSISTANT, 4.0, 1.0)
    return (losses * decisive).sum() / (targets != IGNORED).sum()


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10)


def average_gradients(model: LlamaForCausalLM, workers: int) -> None:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    start = 0
    for gradient in gradients:
        mean = flat[start : start + gradient.numel()] / workers
        gradient.copy_(mean.view_as(gradient))
        start += gradient.numel()


@torch.no_grad()
def update_average(average: LlamaForCausalLM, model: LlamaForCausalLM, keep: float) -> None:
    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(weight, 1 - keep)


def train(worker: int, recipe: TrainingSettings, given: argparse.Namespace) -> None:
    """Train as one of the workers. The first one prints the loss and writes the weights."""
    torch.set_num_threads(1)
    rendezvous = f"file://{given.scratch.resolve()}/rendezvous"
    distributed.init_process_group(
        "gloo", init_method=rendezvous, rank=worker, world_size=recipe.workers
    )
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM.from_pretrained(given.resume) if given.resume else make_model()
    optimizer = make_optimizer(model)
    averaged = copy.deepcopy(model)
    began, total = time.monotonic(), 0.0
    for step, batch in enumerate(make_batches(recipe, worker), recipe.first_step):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        loss = compute_loss(model, batch)
        torch.autograd.backward(loss)
        average_gradients(model, recipe.workers)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_average(averaged, model, recipe.averaging)
        total += loss.item()
        if worker == 0 and (step + 1) % 20 == 0:
            seconds = time.monotonic() - began
            print(f"step {step + 1} loss {total / 20:.5f} after {seconds:.0f} s", flush=True)
            total = 0.0
        if worker == 0 and (step + 1) % recipe.save_every == 0:
            save(averaged, given.scratch / f"step-{step + 1}")
    if worker == 0:
        save(averaged, given.out)


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
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/train"))
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--peak-rate", type=float, default=usual.peak_rate)
    parser.add_argument("--decay-from", type=float, default=usual.decay_from)
    parser.add_argument("--resume", type=Path, help="continue from this folder, at --first-step")
    parser.add_argument("--first-step", type=int, default=usual.first_step)
    given = parser.parse_args()
    recipe = TrainingSettings(
        steps=given.steps,
        workers=given.workers,
        seed=given.seed,
        peak_rate=given.peak_rate,
        decay_from=given.decay_from,
        first_step=given.first_step,
    )
    given.scratch.mkdir(parents=True, exist_ok=True)
    (given.scratch / "rendezvous").unlink(missing_ok=True)
    spawn(train, args=(recipe, given), nprocs=recipe.workers)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
