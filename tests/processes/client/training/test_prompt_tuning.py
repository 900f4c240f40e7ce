"""`tuning_mode` of from_pretrained: losses and gradients of transformers, and answers behind a soft prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes.client.training.test_layer_gradients import close, local
from support.processes.swarm import Running
from torch import Tensor

from modelswarm import AutoDistributedModelForCausalLM
from modelswarm.client.hf.errors import ArgumentError, UnsupportedArgumentError
from modelswarm.client.training.prompts import TuningMode
from modelswarm.local.run_folder import GATEWAY_JOB

ROWS = 5
IDS = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100], [90, 91, 92, 93, 94, 95, 96, 97]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]])


def tuned(running: Running, folder: Path, mode: TuningMode, rows: int = ROWS) -> Any:
    torch.manual_seed(11)
    model = AutoDistributedModelForCausalLM.from_pretrained(
        folder, gateway=running.local.grpc, tuning_mode=mode, pre_seq_len=rows
    )
    for weights in model.parameters():
        if weights.requires_grad:
            torch.nn.init.normal_(weights, std=0.5)
    return model


def right_loss(whole: Any, model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of transformers' own modules with the model's prompts."""
    prompts = model.prompts
    embedded = whole.model.embed_tokens(ids)
    first = prompts.first.expand(len(ids), -1, -1)
    hidden = local(whole, torch.cat((first, embedded), dim=1), 0, 8, prompts.deep)
    logits = whole.lm_head(whole.model.norm(hidden))[:, prompts.rows :].contiguous()
    loss: Tensor = whole.loss_function(logits=logits, labels=labels, vocab_size=320)
    return loss


@pytest.mark.parametrize("mode", ["ptune", "deep_ptune"])
def test_gradients_of_prompts_equal_those_of_transformers(
    toy_swarm: Running, toy_folder: Path, toy_model: Any, mode: TuningMode
) -> None:
    model = tuned(toy_swarm, toy_folder, mode)
    weights = [each for each in model.parameters() if each.requires_grad]
    assert len(weights) == (1 if mode == "ptune" else 2)
    assert model.model.prompt_embeddings.weight is weights[0], "by its name in Petals"
    labels = IDS.clone()
    labels[0, 2] = -100
    output = model(IDS, labels=labels)
    assert output.logits.shape == (2, 8, 320)
    found = torch.autograd.grad(output.loss, weights)
    right = right_loss(toy_model, model, IDS, labels)
    expected = torch.autograd.grad(right, weights)
    assert close(output.loss, right)
    assert all(map(close, found, expected))
    with torch.no_grad():
        assert close(model(IDS).logits, output.logits)


@pytest.mark.full
def test_padded_batch_has_the_loss_of_its_rows(
    toy_swarm: Running, toy_folder: Path, toy_model: Any
) -> None:
    """Padding on either side, as of tokenizers for training and for generation."""
    model = tuned(toy_swarm, toy_folder, "ptune")
    loss = model(IDS, attention_mask=MASK, labels=torch.where(MASK == 1, IDS, -100)).loss
    rows = [row[mask][None] for row, mask in zip(IDS, MASK.bool(), strict=True)]
    parts = [right_loss(toy_model, model, row, row) * (row.shape[1] - 1) for row in rows]
    assert close(loss * sum(row.shape[1] - 1 for row in rows), torch.stack(parts).sum())


@pytest.mark.full
@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_of_transformers_trains_the_soft_prompt(
    toy_swarm: Running, toy_folder: Path, tmp_path: Path, accumulated: int
) -> None:
    """Two steps of the Trainer give the prompts that two steps of a plain loop over the same batches give."""
    from transformers import Trainer, TrainingArguments

    examples = [{"input_ids": row, "labels": row.clone()} for row in IDS.repeat(2, 1)]
    examples[1]["labels"][2:] = -100  # batches of unequal weight
    model = tuned(toy_swarm, toy_folder, "ptune")
    begun = model.prompts.first.detach().clone()
    options = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2 // accumulated,
        gradient_accumulation_steps=accumulated,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        train_sampling_strategy="sequential",
    )
    Trainer(model, options, train_dataset=examples).train()
    loop = tuned(toy_swarm, toy_folder, "ptune")
    assert loop.prompts.first.equal(begun)
    optimizer = torch.optim.SGD([each for each in loop.parameters() if each.requires_grad], lr=0.1)
    for at in (0, 2):
        ids = torch.stack([each["input_ids"] for each in examples[at : at + 2]])
        labels = torch.stack([each["labels"] for each in examples[at : at + 2]])
        loop(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not model.prompts.first.equal(begun)
    assert close(model.prompts.first, loop.prompts.first)


def right_answer(whole: Any, model: Any, ids: Tensor, count: int, **options: Any) -> Tensor:
    """Return the answer of transformers' generate behind the soft prompt."""
    first = model.prompts.first.detach().expand(len(ids), -1, -1)
    embedded = torch.cat((first, whole.model.embed_tokens(ids)), dim=1)
    mask = torch.ones(embedded.shape[:2], dtype=torch.int64)
    found: Tensor = whole.generate(
        inputs_embeds=embedded, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **options
    )
    return found


def greedy_answer(whole: Any, model: Any, ids: Tensor, count: int) -> Tensor:
    """Return the answer of transformers' own modules, in which the model's prompts are added before each block."""
    prompts, made = model.prompts, ids
    with torch.no_grad():
        for _ in range(count):
            first = prompts.first.expand(len(ids), -1, -1)
            rows = torch.cat((first, whole.model.embed_tokens(made)), dim=1)
            hidden = local(whole, rows, 0, 8, prompts.deep)[:, -1:]
            best = whole.lm_head(whole.model.norm(hidden)).argmax(-1)
            made = torch.cat((made, best), dim=1)
    return made[:, ids.shape[1] :]


@pytest.mark.parametrize("mode", ["ptune", "deep_ptune"])
def test_answers_follow_the_soft_prompt(
    toy_swarm: Running, toy_folder: Path, toy_model: Any, mode: TuningMode
) -> None:
    model = tuned(toy_swarm, toy_folder, mode)
    right = greedy_answer(toy_model, model, IDS, 12)
    if mode == "ptune":
        wanted = right_answer(toy_model, model, IDS, 12, do_sample=False, eos_token_id=None)
        assert right.equal(wanted)
    greedy = {"do_sample": False, "eos_token_id": None}
    assert model.generate(IDS, max_new_tokens=12, **greedy)[:, 8:].equal(right)
    with model.inference_session(max_length=30) as session:
        one = model.generate(IDS[:1], max_new_tokens=5, **greedy)
        assert session.position == 13
        two = model.generate(None, max_new_tokens=7, **greedy)
        assert torch.cat((one[:, 8:], two), dim=1).equal(right[:1])
        session.position = 8
        with session.fork() as other:
            again = model.generate(None, max_new_tokens=12, session=other, **greedy)
            assert again.equal(right[:1])
    toy_swarm.wait_empty()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ptune", "deep_ptune"])
def test_beams_and_logits_follow_the_soft_prompt(
    toy_swarm: Running, toy_folder: Path, toy_model: Any, mode: TuningMode
) -> None:
    model = tuned(toy_swarm, toy_folder, mode)
    wanted: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "num_beams": 3}
    if mode == "ptune":
        right = right_answer(toy_model, model, IDS, 8, **wanted)
        assert model.generate(IDS, max_new_tokens=8, **wanted)[:, 8:].equal(right)
    plain: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "output_logits": True}
    scored = model.generate(IDS, max_new_tokens=4, return_dict_in_generate=True, **plain)
    whole = model(IDS).logits[:, -1]
    assert close(scored.logits[0], whole)
    toy_swarm.wait_empty()


@pytest.mark.parametrize("mode", [pytest.param("ptune", marks=pytest.mark.full), "deep_ptune"])
def test_kills_change_no_answer_behind_a_soft_prompt(
    toy_swarm: Running, toy_folder: Path, toy_model: Any, mode: TuningMode
) -> None:
    """The soft prompt is part of the log: a lost server's KV of it is built again, and the gateway has it back."""
    model = tuned(toy_swarm, toy_folder, mode, 40)
    right = greedy_answer(toy_model, model, IDS[:1], 75)
    toy_swarm.wait_whole()
    toy_swarm.wait_empty()
    parts = []
    with model.inference_session(max_length=100):
        given: Tensor | None = IDS[:1]
        for place in range(5):
            new = model.generate(given, max_new_tokens=15, do_sample=False, eos_token_id=None)
            parts.append(new[:, -15:])
            given = None
            if place < 2:
                toy_swarm.kill(toy_swarm.only_session().route[place].peer)
            if place == 2:
                toy_swarm.wait_whole()
                toy_swarm.local.kill(GATEWAY_JOB)
            if place == 3:  # the gateway that took it over has the rows, too
                toy_swarm.wait_whole()
                toy_swarm.kill(toy_swarm.only_session().route[0].peer)
    assert torch.cat(parts, dim=1).equal(right)
    toy_swarm.wait_whole()


WRONG = [
    ({"tuning_mode": "lora", "pre_seq_len": 3}, "tuning_mode"),
    ({"tuning_mode": "ptune"}, "pre_seq_len"),
    ({"tuning_mode": "ptune", "pre_seq_len": 0}, "pre_seq_len"),
    ({"tuning_mode": "ptune", "pre_seq_len": 1024}, "pre_seq_len"),
    ({"pre_seq_len": 3}, "pre_seq_len"),
]


@pytest.mark.full
@pytest.mark.parametrize(("options", "field"), WRONG)
def test_wrong_tuning_is_refused_by_name(
    toy_swarm: Running, toy_folder: Path, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ArgumentError) as refused:
        AutoDistributedModelForCausalLM.from_pretrained(
            toy_folder, gateway=toy_swarm.local.grpc, **options
        )
    assert refused.value.field == field


@pytest.mark.full
def test_wrong_inputs_are_refused_by_name(toy_swarm: Running, toy_folder: Path) -> None:
    model = tuned(toy_swarm, toy_folder, "ptune")
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"labels": IDS[:, :7]}, ArgumentError, "labels"),
        ({"labels": IDS.float()}, ArgumentError, "labels"),
        ({"labels": IDS + 300}, ArgumentError, "labels"),
        ({"attention_mask": MASK[:, :7]}, ArgumentError, "attention_mask"),
        ({"attention_mask": 2 * MASK}, ArgumentError, "attention_mask"),
        ({"attention_mask": 0 * MASK}, ArgumentError, "attention_mask"),
        ({"use_cache": True, "labels": IDS}, UnsupportedArgumentError, "use_cache"),
        ({"output_hidden_states": True}, UnsupportedArgumentError, "output_hidden_states"),
    ]
    for options, kind, field in wrong:
        with pytest.raises(kind) as refused:
            model(IDS, **options)
        error: Any = refused.value
        assert error.field == field
    with pytest.raises(ArgumentError, match="rows begin with pad_token_id 0"):
        model(torch.tensor([[0, 0, 5], [1, 2, 3]]), labels=torch.tensor([[0, 0, 5], [1, 2, 3]]))
    ids = IDS.float().requires_grad_()
    with pytest.raises(ArgumentError, match="the dtype is"):
        model(ids)
