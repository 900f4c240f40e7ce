"""Bad input of `from_pretrained` and `generate` is refused by name, before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.swarm import Running
from transformers import GenerationConfig

from modelswarm.client.hf import AutoDistributedModelForCausalLM
from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.sessions.errors import (
    ConnectionLostError,
    SessionClosedError,
    SessionLengthError,
)
from modelswarm.errors import UnreachableError, UserError

IDS = torch.tensor([[65, 12, 200]])
TWO = torch.tensor([[0, 65, 12], [65, 12, 200]])


@pytest.fixture
def deaf_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the model with a connection that fails the test when something is sent."""

    class Silent:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"something was sent: {name}")

    monkeypatch.setattr(model, "connection", Silent())
    return model


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"inputs": [[65, 12]]}, "input_ids"),
        ({"inputs": torch.tensor([65, 12])}, "input_ids"),
        ({"inputs": torch.zeros(1, 2, 3, dtype=torch.long)}, "input_ids"),
        ({"inputs": torch.zeros(1, 0, dtype=torch.long)}, "input_ids"),
        ({"inputs": torch.zeros(0, 3, dtype=torch.long)}, "input_ids"),
        ({"inputs": torch.tensor([[65.0, 12.0]])}, "input_ids"),
        ({"inputs": torch.tensor([[True, False]])}, "input_ids"),
        ({"inputs": torch.tensor([[65, 320]])}, "input_ids"),
        ({"inputs": torch.tensor([[65, -1]])}, "input_ids"),
        ({"inputs": IDS, "input_ids": IDS}, "input_ids"),
        ({"inputs": IDS, "attention_mask": torch.ones(1, 2)}, "attention_mask"),
        ({"inputs": IDS, "attention_mask": torch.tensor([[1, 1, 0]])}, "attention_mask"),
        ({"inputs": IDS, "attention_mask": torch.tensor([[0.5, 1, 1]])}, "attention_mask"),
        ({"inputs": IDS, "attention_mask": [[1, 1, 1]]}, "attention_mask"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"inputs": TWO}, "attention_mask"),
    ],
    ids=range(16),
)
def test_wrong_tensors_are_refused_here(deaf_model: Any, arguments: Any, field: str) -> None:
    with pytest.raises(UserError) as refused:
        deaf_model.generate(max_new_tokens=3, **arguments)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("custom_generate", "someone/some-loop"),
        ("assistant_early_exit", 2),
        ("penalty_alpha", 0.6),
        ("dola_layers", "low"),
        ("num_beam_groups", 2),
        ("force_words_ids", [[5]]),
        ("cache_implementation", "static"),
        ("past_key_values", object()),
        ("inputs_embeds", torch.zeros(1, 3, 8)),
        ("position_ids", torch.tensor([[0, 1, 2]])),
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("prefill_chunk_size", 8),
        ("use_cache", False),
    ],
)
def test_argument_without_effect_is_refused_by_name(deaf_model: Any, name: str, value: Any) -> None:
    with pytest.raises(UserError) as refused:
        deaf_model.generate(IDS, max_new_tokens=3, **{name: value})
    assert refused.value.field == name
    assert str(refused.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"suppress_tokens": list(range(320))}, "suppress_tokens"),
        ({"suppress_tokens": list(range(319)), "bad_words_ids": [[319]]}, "suppress_tokens"),
        ({"labels": IDS}, "labels"),
        ({"custom_generate": 5}, "custom_generate"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"top_k": 10**12, "do_sample": True}, "top_k"),
        ({"temperature": 0.0, "do_sample": True}, "temperature"),
        ({"streamer": 5}, "streamer"),
        ({"generation_config": {}}, "generation_config"),
        ({"max_tokens": 9}, "max_tokens"),
    ],
    ids=range(11),
)
def test_wrong_value_of_generate_is_refused(deaf_model: Any, wanted: Any, field: str) -> None:
    with pytest.raises(ArgumentError if field != "labels" else UserError) as refused:
        deaf_model.generate(IDS, **{"max_new_tokens": 3, **wanted})
    assert refused.value.field == field
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keep", [-1, 2.5, "x"])
@pytest.mark.parametrize("labels", [None, IDS])
def test_wrong_count_of_logits_is_refused(deaf_model: Any, keep: Any, labels: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^logits_to_keep: "):
        deaf_model(IDS, logits_to_keep=keep, labels=labels)


def test_more_logits_than_the_input_has_are_its_own(model: Any) -> None:
    assert model(IDS, logits_to_keep=100).logits.equal(model(IDS).logits)


def test_input_beyond_the_context_is_refused_here(deaf_model: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: deaf_model(torch.ones(1, 1025, dtype=torch.long)),
        lambda: deaf_model.inference_session(max_length=10**9),
        lambda: deaf_model.model.layers(torch.zeros(1, 5000, deaf_model.config.hidden_size)),
    ]
    for call in calls:
        with pytest.raises(SessionLengthError, match=r"(1025|1000000000|5000) .*too many"):
            call()


def test_cache_that_is_none_or_closed_is_refused(model: Any) -> None:
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ArgumentError, match=r"^past_key_values: past_key_values has 1 rows"):
        model(IDS.repeat(2, 1), past_key_values=cache)
    cache.close()
    with pytest.raises(SessionClosedError, match=r"past_key_values was closed"):
        model(IDS, past_key_values=cache)
    with pytest.raises(ArgumentError, match=r"^past_key_values: a int"):
        model(IDS, past_key_values=5)


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "hidden_size"])
def test_folder_of_another_model_is_refused(
    toy_swarm: Running, toy_folder: Path, tmp_path: Path, name: str
) -> None:
    config = json.loads((toy_folder / "config.json").read_text())
    other = config | {name: config[name] * 2}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ArgumentError, match=f"{name} is {other[name]} .*, and {config[name]} at"):
        AutoDistributedModelForCausalLM.from_pretrained(tmp_path, gateway=toy_swarm.local.grpc)


def test_fields_of_a_configuration_object_are_refused_too(deaf_model: Any) -> None:
    made: Any = GenerationConfig
    wanted = made(penalty_alpha=0.5, max_new_tokens=3)
    with pytest.raises(UserError, match="penalty_alpha"):
        deaf_model.generate(IDS, wanted)
    with pytest.raises(ValueError, match="not used by the model"):
        deaf_model.generate(IDS, max_new_tokens=3, max_tokens=9)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"labels": IDS[:, :2]}, "labels"),
        ({"inputs_embeds": torch.zeros(1, 3, 8)}, "inputs_embeds"),
        ({"position_ids": IDS}, "position_ids"),
    ],
)
def test_wrong_option_of_forward_is_refused(deaf_model: Any, options: Any, field: str) -> None:
    with pytest.raises(UserError) as refused:
        deaf_model(IDS, **options)
    assert refused.value.field == field
    with pytest.raises(UserError, match="input_ids"):
        deaf_model(torch.tensor([[320]]))


@pytest.mark.parametrize(
    ("ids", "mask", "sentence"),
    [
        (IDS, torch.ones(1, 2), "the shape is [1, 2]; allowed: that of input_ids, [1, 3]"),
        (IDS, torch.ones(1, 4), "the shape is [1, 4]; allowed: that of input_ids, [1, 3]"),
        (IDS, torch.ones(3), "the shape is [3]; allowed: that of input_ids, [1, 3]"),
        (TWO, torch.ones(1, 3), "the shape is [1, 3]; allowed: that of input_ids, [2, 3]"),
        (IDS, [[1, 1, 1]], "the shape is list; allowed: that of input_ids, [1, 3]"),
        (IDS, torch.tensor([[0.5, 1, 1]]), "allowed values: 0 for padding, 1 for tokens"),
        (TWO, torch.zeros(2, 3), "all of input_ids is padding; allowed: at least one token"),
        (TWO, None, "rows begin with pad_token_id 0, and a forward pass infers no mask"),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("keep", [0, 1])
def test_wrong_mask_of_logits_is_refused(
    deaf_model: Any, ids: Any, mask: Any, sentence: str, keep: int
) -> None:
    with pytest.raises(UserError) as refused:
        deaf_model(ids, attention_mask=mask, logits_to_keep=keep)
    assert refused.value.field == "attention_mask"
    assert str(refused.value).startswith(f"attention_mask: {sentence}")


def test_mask_behind_a_cache_has_its_positions_too(model: Any) -> None:
    first = model(IDS, use_cache=True)
    for wrong in (torch.ones(1, 3), torch.tensor([[1, 1, 1, 0, 0, 0]])):
        with pytest.raises(UserError, match="attention_mask: "):
            model(IDS, attention_mask=wrong, past_key_values=first.past_key_values)
    second = model(IDS, attention_mask=torch.ones(1, 6), past_key_values=first.past_key_values)
    assert torch.allclose(second.logits, model(IDS.repeat(1, 2)).logits[:, 3:], atol=1e-3)
    first.past_key_values.close()


def test_context_that_servers_do_not_have_is_refused(deaf_model: Any) -> None:
    with pytest.raises(UserError, match="the context of the swarm has 1024"):
        deaf_model.generate(IDS, max_new_tokens=1022)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gateway": "nowhere"}, "gateway"),
        ({"served_name": "gpt-9"}, "served_name"),
        ({"initial_peers": ["/ip4/1.2.3.4"]}, "initial_peers"),
        ({"torch_dtype": torch.float32}, "torch_dtype"),
        ({"sampling": "nowhere"}, "sampling"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_option_of_from_pretrained_is_refused(
    toy_swarm: Running, toy_folder: Path, options: Any, field: str
) -> None:
    given = {"gateway": toy_swarm.local.grpc, **options}
    with pytest.raises(UserError) as refused:
        AutoDistributedModelForCausalLM.from_pretrained(toy_folder, **given)
    assert refused.value.field == field


def test_gateway_that_is_none_is_an_error(toy_swarm: Running, toy_folder: Path) -> None:
    load = AutoDistributedModelForCausalLM.from_pretrained
    for target in ("127.0.0.1:1", toy_swarm.local.http):
        with pytest.raises(ConnectionLostError, match="no gateway answers"):
            load(toy_folder, gateway=target)
    with pytest.raises(UnreachableError, match="no Inference API"):
        load(toy_folder, gateway=toy_swarm.local.admin)


def test_other_family_is_refused(toy_swarm: Running, toy_folder: Path, tmp_path: Path) -> None:
    from modelswarm import DistributedBloomForCausalLM, DistributedLlamaForCausalLM

    gateway = toy_swarm.local.grpc
    assert type(DistributedLlamaForCausalLM.from_pretrained(toy_folder, gateway=gateway)) is (
        DistributedLlamaForCausalLM
    )
    with pytest.raises(UserError, match="model_type 'llama'; allowed here: bloom"):
        DistributedBloomForCausalLM.from_pretrained(toy_folder, gateway=gateway)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match="model_type 'bert'"):
        AutoDistributedModelForCausalLM.from_pretrained(tmp_path, gateway=gateway)
    with pytest.raises(ImportError):
        from modelswarm import DistributedBertForCausalLM  # noqa: F401


def test_model_without_weights_generates_and_has_no_modules(
    toy_swarm: Running, toy_folder: Path, tmp_path: Path, model: Any
) -> None:
    (tmp_path / "config.json").write_bytes((toy_folder / "config.json").read_bytes())
    bare = AutoDistributedModelForCausalLM.from_pretrained(tmp_path, gateway=toy_swarm.local.grpc)
    wanted = {"max_new_tokens": 3, "do_sample": False}
    assert bare.generate(IDS, **wanted).equal(model.generate(IDS, **wanted))
    for read in (bare.get_input_embeddings, lambda: bare.lm_head, lambda: bare(IDS, labels=IDS)):
        with pytest.raises(UserError, match="are not fetched from a gateway; give from_pretrained"):
            read()
