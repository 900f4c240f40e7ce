"""Arguments that need logits at the client run by transformers' own code on those of the servers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.tiny_models import TOY_LENGTH, VOCAB
from support.processes.swarm import Running
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TextStreamer,
    WatermarkingConfig,
)
from typing_extensions import override

from modelswarm.client.hf import AutoDistributedModelForCausalLM
from modelswarm.client.sessions.session import GatewaySession

PROMPTS = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100], [90, 91, 92, 93, 94, 95, 96, 97]])
PADDED = torch.tensor([[0, 0, 0, 65, 12, 200], [90, 91, 92, 93, 94, 95]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
ENDLESS: dict[str, Any] = {"eos_token_id": None, "max_new_tokens": 12}


class NoOdd(LogitsProcessor):
    """Forbids odd tokens after a multiple of 3."""

    @override
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        scores[input_ids[:, -1] % 3 == 0, 1::2] = -float("inf")
        return scores


@pytest.fixture(scope="module")
def drawing(toy_swarm: Running, toy_folder: Path) -> Any:
    """Return the model that draws its tokens at the client."""
    return AutoDistributedModelForCausalLM.from_pretrained(
        toy_folder, gateway=toy_swarm.local.grpc, sampling="client"
    )


def test_forward_equals_the_whole_model(model: Any, toy_model: Any) -> None:
    """Petals' test_full_model_exact_match."""
    with torch.no_grad():
        whole = toy_model(PROMPTS).logits
    ours = model(PROMPTS)
    assert ours.past_key_values is None
    assert ours.logits.shape == whole.shape
    assert torch.allclose(ours.logits, whole, atol=1e-3)
    assert torch.allclose(model(PROMPTS, logits_to_keep=2).logits, whole[:, -2:], atol=1e-3)
    steps: list[Any] = []
    cache: Any = None
    for begin, end in ((0, 1), (1, 6), (6, 7), (7, 8)):
        name = "cache" if end == 7 else "past_key_values"  # since transformers 5.24, and before
        out = model(PROMPTS[:, begin:end], use_cache=True, **{name: cache})
        cache = out.past_key_values
        steps.append(out.logits)
    assert torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-3)
    assert cache.get_seq_length() == 8
    cache.close()
    padded = model(PADDED, attention_mask=MASK).logits
    assert torch.allclose(padded[0, 3:], model(PADDED[:1, 3:]).logits[0], atol=1e-3)


def test_forward_reads_the_whole_context(model: Any, toy_model: Any) -> None:
    """No position is kept for a token behind it; a single token is a context, too."""
    for length in (1, TOY_LENGTH):
        ids = torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            whole = toy_model(ids, output_hidden_states=True)
        assert torch.allclose(model(ids).logits, whole.logits, atol=1e-3)
        first = model.model.layers[:1](whole.hidden_states[0])
        assert torch.allclose(first, whole.hidden_states[1], atol=1e-3)


def test_logits_of_padding_on_either_side_are_zeros(model: Any, toy_model: Any) -> None:
    ids, mask = torch.cat([PADDED, PADDED.flip(1)]), torch.cat([MASK, MASK.flip(1)])
    with torch.no_grad():
        whole = toy_model(ids, attention_mask=mask).logits * mask[..., None]
    for keep in (0, 2, 1):
        ours = model(ids, attention_mask=mask, logits_to_keep=keep).logits
        assert torch.allclose(ours, whole[:, -keep:], atol=1e-3)
    assert not model(ids[2:3], attention_mask=mask[2:3], logits_to_keep=2).logits.any()


@pytest.mark.parametrize(
    "wanted",
    [
        {"logits_processor": [NoOdd()]},
        {
            "prefix_allowed_tokens_fn": lambda batch, ids: [
                (int(ids[-1]) * 7 + k) % 320 for k in (1, 2)
            ]
        },
        pytest.param({"sequence_bias": [[[90, 229], -9.0], [[255], 2.0]]}, marks=pytest.mark.full),
        pytest.param({"begin_suppress_tokens": list(range(0, 320, 2))}, marks=pytest.mark.full),
        {"forced_eos_token_id": 7},
        {"repetition_penalty": 12.0},
        pytest.param({"encoder_repetition_penalty": 1.3}, marks=pytest.mark.full),
        {"guidance_scale": 1.5},
        {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
        {"exponential_decay_length_penalty": (3, 1.8), "eos_token_id": [5, 9]},
        pytest.param({"remove_invalid_values": True}, marks=pytest.mark.full),
        pytest.param({"encoder_no_repeat_ngram_size": 1}, marks=pytest.mark.full),
        pytest.param({"num_beams": 3}, marks=pytest.mark.full),
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"num_beams": 3, "no_repeat_ngram_size": 2, "early_stopping": True},
    ],
    ids=lambda wanted: "-".join(wanted),
)
def test_greedy_and_beams_equal_transformers(
    model: Any, toy_model: Any, wanted: dict[str, Any]
) -> None:
    arguments = {"do_sample": False, **ENDLESS, **wanted}
    for ids in (PROMPTS[:1], PROMPTS):
        assert torch.equal(model.generate(ids, **arguments), toy_model.generate(ids, **arguments))


def test_forced_first_token_equals_transformers(model: Any, toy_model: Any) -> None:
    """transformers forces it behind a prompt of one token only."""
    wanted = {"do_sample": False, "forced_bos_token_id": 9, **ENDLESS}
    for ids in (PROMPTS[:, :1], PROMPTS):
        ours = model.generate(ids, **wanted)
        assert torch.equal(ours, toy_model.generate(ids, **wanted))
        assert (ours[:, 1] == 9).all() == (ids.shape[1] == 1)


@pytest.mark.parametrize("length", [4, pytest.param(8, marks=pytest.mark.full)])
def test_negative_prompt_equals_transformers(model: Any, toy_model: Any, length: int) -> None:
    wanted = {"do_sample": False, "guidance_scale": 1.5, **ENDLESS}
    for ids in (PROMPTS[:1], PROMPTS):
        negative = {"negative_prompt_ids": PROMPTS.flip(1)[: len(ids), :length]}
        ours = model.generate(ids, **negative, **wanted)
        assert torch.equal(ours, toy_model.generate(ids, **negative, **wanted))
        assert not torch.equal(ours, model.generate(ids, **wanted))


def test_healed_token_equals_transformers(model: Any, toy_model: Any, toy_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    tokenizer.pad_token = tokenizer.bos_token = tokenizer.eos_token
    ids = tokenizer("abc <", return_tensors="pt")["input_ids"]  # <|end|> begins with its end
    wanted = {"do_sample": False, "token_healing": True, "tokenizer": tokenizer, **ENDLESS}
    ours = model.generate(ids, **wanted)
    assert torch.equal(ours, toy_model.generate(ids, **wanted))


def test_beams_read_their_prompt_once(
    model: Any, toy_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.cat([PROMPTS[:1], PROMPTS[1:]] * 8, dim=1)
    sent: list[int] = []
    read = GatewaySession.read_rows

    def count(session: GatewaySession, tokens: Any, **options: Any) -> Any:
        sent.append(len(tokens))
        return read(session, tokens, **options)

    monkeypatch.setattr(GatewaySession, "read_rows", count)
    wanted = {"do_sample": False, "num_beams": 4, **ENDLESS}
    both = torch.cat([ids, ids.flip(1)])
    assert torch.equal(model.generate(both, **wanted), toy_model.generate(both, **wanted))
    prompts = [tokens for tokens in sent if tokens >= ids.shape[1]]
    assert prompts == [ids.shape[1]] * 2


def test_padded_beams_with_end_tokens_equal_transformers(model: Any, toy_model: Any) -> None:
    wanted = {"attention_mask": MASK, "num_beams": 3, "eos_token_id": list(range(0, 320, 5))}
    arguments = {"do_sample": False, "max_new_tokens": 12, **wanted}
    assert torch.equal(model.generate(PADDED, **arguments), toy_model.generate(PADDED, **arguments))


@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 20, "repetition_penalty": 1.3, "num_return_sequences": 2},
        pytest.param({"min_p": 0.02, "typical_p": 0.9}, marks=pytest.mark.full),
        pytest.param({"top_h": 0.4}, marks=pytest.mark.full),
        {"epsilon_cutoff": 0.01, "temperature": 3.0},
        pytest.param({"eta_cutoff": 0.01}, marks=pytest.mark.full),
        pytest.param({"no_repeat_ngram_size": 1}, marks=pytest.mark.full),
        {"bad_words_ids": [[90, 229], *([token] for token in range(0, 320, 2))]},
        {"sequence_bias": [[[90, 229], -9.0], [[255], 8.0]]},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=5)},
        {"num_beams": 3},
    ],
    ids=lambda wanted: "-".join(wanted),
)
def test_seeded_sampling_equals_transformers(
    drawing: Any, toy_model: Any, wanted: dict[str, Any]
) -> None:
    """Petals' test_sampling: the same seeds give the same ids as transformers."""
    for ids in (PROMPTS[:1], PROMPTS):
        outputs = []
        for each in (drawing, toy_model):
            torch.manual_seed(4)
            outputs.append(each.generate(ids, do_sample=True, **ENDLESS, **wanted))
        assert torch.equal(*outputs)


def test_assistants_equal_transformers(model: Any, toy_model: Any) -> None:
    repeated = torch.cat([PROMPTS[:1], PROMPTS[:1]], dim=1)
    whole = toy_model.generate(repeated, do_sample=False, **ENDLESS)
    for wanted in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": toy_model}):
        assert torch.equal(whole, model.generate(repeated, do_sample=False, **ENDLESS, **wanted))


@pytest.mark.parametrize(
    "count", [57, *(pytest.param(each, marks=pytest.mark.full) for each in (58, 59)), 60]
)
def test_prompt_lookup_ends_at_the_last_position(model: Any, toy_model: Any, count: int) -> None:
    """Drafts of transformers go beyond max_length, for which a session has no room."""
    repeated = torch.cat([PROMPTS[:1], PROMPTS[:1]], dim=1)
    wanted: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count}
    whole = toy_model.generate(repeated, **wanted)
    wanted["prompt_lookup_num_tokens"] = 5
    assert torch.equal(model.generate(repeated, **wanted), whole)
    with model.inference_session(max_length=16 + count) as session:
        assert torch.equal(model.generate(repeated, **wanted), whole)
        assert session.tokens == whole.tolist()


@pytest.fixture(scope="module")
def noised_model(toy_model: Any) -> Any:
    """Return a copy of the toy whose drafts are accepted in part."""
    noised = copy.deepcopy(toy_model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in noised.parameters():
            weight += torch.randn(weight.shape, generator=generator) * weight.std() * 0.1
    return noised


def test_rejected_drafts_change_no_token(model: Any, toy_model: Any, noised_model: Any) -> None:
    """Petals' test_remote_speculative_generation; and in a session."""
    wanted: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    whole = toy_model.generate(PROMPTS[:1], max_new_tokens=40, **wanted)
    with torch.no_grad():
        drafts = noised_model(whole).logits.argmax(-1)[:, 7:-1]
    assert 0 < (drafts == whole[:, 8:]).float().mean() < 1
    wanted["assistant_model"] = noised_model
    assert torch.equal(model.generate(PROMPTS[:1], max_new_tokens=40, **wanted), whole)
    with model.inference_session(max_length=50) as session:
        first = model.generate(PROMPTS[:1], max_new_tokens=25, **wanted)
        assert session.tokens == first.tolist()
        more = model.generate(None, max_new_tokens=15, **wanted)
        assert torch.equal(torch.cat([first, more], dim=1), whole)
        assert session.tokens == whole.tolist()


def test_scores_and_logits_are_returned(model: Any, toy_model: Any) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, whole = (
        each.generate(PROMPTS, do_sample=False, top_k=None, **ENDLESS, **wanted)
        for each in (model, toy_model)
    )
    assert torch.equal(ours.sequences, whole.sequences)
    assert ours.past_key_values is None
    for name in ("scores", "logits"):
        both = zip(getattr(ours, name), getattr(whole, name), strict=True)
        assert all(torch.allclose(one, other, atol=1e-3) for one, other in both)


def test_model_with_use_cache_off_equals_transformers(
    model: Any, toy_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints that were saved after training often have `use_cache: false` as their default."""
    monkeypatch.setattr(model.generation_config, "use_cache", False)
    wanted = {"do_sample": False, "num_beams": 2, **ENDLESS}
    assert torch.equal(model.generate(PROMPTS, **wanted), toy_model.generate(PROMPTS, **wanted))
    with model.inference_session(max_length=100, batch_size=2):
        wanted = {"do_sample": False, "logits_processor": [NoOdd()], **ENDLESS}
        assert torch.equal(model.generate(PROMPTS, **wanted), toy_model.generate(PROMPTS, **wanted))


@pytest.mark.full
def test_session_continues_after_turns_with_logits(
    model: Any, toy_model: Any, toy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"do_sample": False, "logits_processor": [NoOdd()], **ENDLESS}
    whole = toy_model.generate(PROMPTS, **wanted | {"max_new_tokens": 24})
    with model.inference_session(max_length=40, batch_size=2) as session:
        first = model.generate(PROMPTS, **wanted)
        assert session.tokens == first.tolist()
        more = model.generate(None, **wanted)
        assert torch.equal(torch.cat([first, more], dim=1), whole)
        assert session.tokens == whole.tolist()
        session.position = 20
        again = model.generate(None, do_sample=False, **ENDLESS)
        assert torch.equal(
            again, toy_model.generate(whole[:, :20], do_sample=False, **ENDLESS)[:, 20:]
        )
    with model.inference_session(max_length=60) as session:
        wanted = {"do_sample": False, "prompt_lookup_num_tokens": 3, **ENDLESS}
        first = model.generate(PROMPTS[:1], **wanted)
        streamer = TextStreamer(AutoTokenizer.from_pretrained(toy_folder), skip_prompt=True)
        more = model.generate(None, streamer=streamer, **wanted)
        both = torch.cat([first, more], dim=1)
        assert session.tokens == both.tolist()
        whole = toy_model.generate(PROMPTS[:1], do_sample=False, **ENDLESS | {"max_new_tokens": 24})
        assert torch.equal(both, whole)
    assert capsys.readouterr().out == f"{streamer.tokenizer.decode(more[0])}\n"


def test_row_that_ends_early_in_a_session_ends_there(model: Any, toy_model: Any) -> None:
    whole = toy_model.generate(PROMPTS, do_sample=False, **ENDLESS)
    wanted = {"eos_token_id": int(whole[0, 10]), "pad_token_id": 3, "repetition_penalty": 12.0}
    with model.inference_session(max_length=40) as session:
        out = model.generate(PROMPTS, do_sample=False, max_new_tokens=12, **wanted)
        expected = toy_model.generate(PROMPTS, do_sample=False, max_new_tokens=12, **wanted)
        assert torch.equal(out, expected)
        for log, row in zip(session.tokens, expected.tolist(), strict=True):
            assert row[: len(log)] == log
            assert set(row[len(log) :]) <= {3}


def test_function_of_the_caller_gets_the_prepared_arguments(model: Any, toy_model: Any) -> None:
    def first_of_two(model: Any, input_ids: Any, generation_config: Any, **options: Any) -> Any:
        logits = model(input_ids, logits_to_keep=1).logits[:, -1]
        return torch.cat([input_ids, logits.topk(2).indices[:, 1:]], dim=1)

    with torch.no_grad():
        second = toy_model(PROMPTS).logits[:, -1].topk(2).indices[:, 1:]
    out = model.generate(PROMPTS, custom_generate=first_of_two, max_new_tokens=3)
    assert torch.equal(out[:, 8:], second)


@pytest.mark.full
def test_killed_servers_change_no_beam(toy_swarm: Running, model: Any, toy_model: Any) -> None:
    toy_swarm.wait_whole()
    before = toy_swarm.faults()

    class Killer(LogitsProcessor):
        """Kills the tail of a session before beams are forked from it, and at the twentieth token."""

        @override
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] in (8, 28):
                toy_swarm.wait_whole()
                toy_swarm.kill(toy_swarm.sessions()[0].route[-1].peer)
            return scores

    wanted = {"do_sample": False, "num_beams": 3, "eos_token_id": None, "max_new_tokens": 40}
    ours = model.generate(PROMPTS[:1], logits_processor=[Killer()], **wanted)
    assert torch.equal(ours, toy_model.generate(PROMPTS[:1], **wanted))
    assert toy_swarm.faults().reroutes >= before.reroutes
    toy_swarm.wait_whole()
    assert not toy_swarm.sessions(), "beams leave no session behind"
