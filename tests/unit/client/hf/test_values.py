"""Each wrong value is refused by its name, by one sentence and without a connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from typing_extensions import override

from modelswarm.client.engine.options import check_names
from modelswarm.client.engine.session import InferenceSession, _to_tensor
from modelswarm.client.hf import AutoDistributedModelForCausalLM
from modelswarm.client.hf.auto import _compare_config
from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.hf.inputs import (
    check_context,
    check_ids,
    check_length,
    infer_mask,
    kept_logits,
)
from modelswarm.client.hf.layers import LayersSession, RemoteLayers
from modelswarm.client.hf.remote_cache import RemoteCache, check_cache, take_cache
from modelswarm.client.hf.values import check_config, check_values, named_errors
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.errors import SessionClosedError, SessionLengthError, translate
from modelswarm.client.sessions.session import GatewaySession
from modelswarm.errors import ModelSourceError, UserError

NAN = float("nan")
NONE: Any = None
IDS = torch.tensor([[1, 2]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", list(range(320))),
        ("suppress_tokens", [1.5]),
        ("suppress_tokens", 5),
        ("suppress_tokens", [320]),
        ("custom_generate", 5),
        ("use_cache", "x"),
        ("do_sample", "yes"),
        ("num_return_sequences", 0),
        ("num_return_sequences", -1),
        ("top_p", NAN),
        ("top_p", 2),
        ("typical_p", NAN),
        ("typical_p", 2.0),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", NAN),
        ("no_repeat_ngram_size", 10**10),
        ("max_time", NAN),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", NAN),
        ("max_new_tokens", True),
        ("top_k", 10**12),
        ("eos_token_id", -1),
        ("eos_token_id", "x"),
        ("pad_token_id", [1]),
        ("num_beams", 0),
        ("num_beams", -1),
        ("num_beams", 1.5),
        ("streamer", 5),
        ("logits_processor", 5),
        ("stopping_criteria", 5),
        ("assistant_model", 5),
        ("sequence_bias", [1]),
        ("temperature", "hot"),
    ],
)
def test_wrong_value_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        check_values({name: value}, {}, 320)
    assert refused.value.field == name
    check_values({name: None}, {}, 320)


def test_right_values_are_taken() -> None:
    given = {"top_k": 0, "top_p": 1, "temperature": 0.0, "max_time": 2, "eos_token_id": [1, 2]}
    check_values(given | {"suppress_tokens": list(range(319)), "num_beams": 4}, {}, 320)
    check_values({"pad_token_id": -1}, {"pad_token_id": -1}, 320)  # of the model itself
    check_values({"eos_token_id": torch.tensor([1, 2]), "sequence_bias": {(1,): 2.0}}, {}, 320)


def test_errors_of_transformers_are_named_until_a_token_came() -> None:
    with (
        pytest.raises(ArgumentError, match=r"^top_k: top_k is bad, at 5$"),
        named_errors({"top_k": 5}, lambda: False),
    ):
        raise ValueError("top_k is bad,\n at 5")
    with pytest.raises(ValueError, match=r"^mine$"), named_errors({}, lambda: True):
        raise ValueError("mine")
    with pytest.raises(SessionLengthError), named_errors({}, lambda: False):
        raise SessionLengthError("max_length", "too long")


@pytest.mark.parametrize("value", [5, {}])
def test_other_configuration_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^generation_config: a "):
        check_config(value)


@pytest.mark.parametrize("keep", [-1, 2.5, "x", True, torch.tensor([1])])
def test_count_of_logits_that_is_none_is_refused(keep: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^logits_to_keep: "):
        kept_logits(keep, 4)


def test_count_of_logits_is_at_most_the_input() -> None:
    assert [kept_logits(keep, 4) for keep in (0, 1, 4, 100)] == [4, 1, 4, 4]


@pytest.mark.parametrize("ids", [IDS.to("meta"), IDS.to_sparse()])
def test_ids_without_numbers_are_refused(ids: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^input_ids: the tensor is "):
        check_ids(ids, 320)


def make_layers() -> RemoteLayers:
    served = ServedModel("m", context=64, n_blocks=4, hidden_size=8, dtype="float32")
    return RemoteLayers(NONE, served, 0, 4)


@pytest.mark.parametrize(
    "place", [1.5, True, "x", [None], [1, 2], None, slice(0, 1.5), slice(0, 2, 0)]
)
def test_place_that_is_none_is_refused(place: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^layers: "):
        make_layers()[place]


def test_places_of_blocks_are_as_in_a_list() -> None:
    assert [layer.first for layer in make_layers()] == [0, 1, 2, 3]
    assert make_layers()[True + 1].first == 2
    with pytest.raises(IndexError):
        make_layers()[4]


@pytest.mark.parametrize("size", [0, 1.5, True, "x"])
def test_batch_size_of_layers_is_an_integer_from_1(size: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^batch_size: "):
        make_layers().inference_session(max_length=8, batch_size=size)


def test_more_positions_than_the_context_are_refused() -> None:
    with pytest.raises(SessionLengthError, match=r"^max_length: 5000 is too many"):
        LayersSession(NONE, make_layers()._served, (0, 4), 5000, 1, None)
    with pytest.raises(SessionLengthError, match=r"^max_length: 1000000000 is too many"):
        check_length(10**9, 64)
    with pytest.raises(SessionLengthError, match=r"^input_ids: 65 positions are too many; the con"):
        check_context(65, 64)
    check_context(64, 64)
    check_context(65, 0)


def test_caches_of_others_are_refused() -> None:
    from transformers import DynamicCache

    made: Any = DynamicCache
    for wrong in (5, made()):
        with pytest.raises(ArgumentError, match=r"^past_key_values: a "):
            check_cache(wrong, IDS)
    cache = RemoteCache(NONE, 320)
    cache._logs = [[1], [2]]
    with pytest.raises(ArgumentError, match=r"^past_key_values: past_key_values has 2 rows"):
        check_cache(cache, IDS)
    cache.close()
    with pytest.raises(SessionClosedError, match=r"past_key_values was closed"):
        check_cache(cache, IDS)


def test_cache_has_either_name_and_not_both() -> None:
    """transformers renamed it in 5.24."""
    one, other = RemoteCache(NONE, 320), RemoteCache(NONE, 320)
    assert take_cache(one, None, IDS) is take_cache(None, one, IDS) is one
    assert take_cache(None, None, IDS) is None
    with pytest.raises(ArgumentError, match=r"^cache: past_key_values is another name of it"):
        take_cache(one, other, IDS)


@pytest.mark.parametrize("ttl", [-1, 0, "x", NAN, True, 86_401])
def test_ttl_that_is_none_is_refused(ttl: Any) -> None:
    with pytest.raises(UserError, match=r"^ttl: "):
        GatewaySession(NONE, "m", 10, ttl=ttl)


@pytest.mark.parametrize("gateway", [5, ["127.0.0.1:1"], ""])
def test_address_that_is_no_text_is_refused(gateway: Any) -> None:
    with pytest.raises(UserError, match=r"^gateway: "):
        Connection(gateway)


def test_engine_refuses_other_objects_and_names() -> None:
    number: Any = 5
    with pytest.raises(ArgumentError, match=r"^engine: a int"):
        InferenceSession(number, max_length=10)
    with pytest.raises(UserError, match=r"^foo: there is no such option; allowed: max_new_tokens"):
        check_names({"foo": 1})


@pytest.mark.parametrize(
    ("ids", "name", "sentence"),
    [
        ([[5, 6]], "input_ids", "the shape is [1, ...]; allowed: a list of integers"),
        ([[5]], "token", "a list without token ids; allowed: one integer"),
        (["x"], "token", "a str without token ids; allowed: one integer"),
        (5, "tokens", "a int without token ids; allowed: integers [batch]"),
    ],
)
def test_wrong_ids_of_a_step_name_the_shape(ids: Any, name: str, sentence: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        _to_tensor(ids, name)
    assert str(refused.value).startswith(f"{name}: {sentence}")


def test_model_of_other_sizes_is_refused() -> None:
    class Config:
        vocab_size, num_hidden_layers, hidden_size = 320, 4, 8

    known = {"vocab_size": 320, "n_blocks": 4, "hidden_size": 8}
    _compare_config(Config, ServedModel("m"))
    _compare_config(Config, ServedModel("m", **known))  # type: ignore[arg-type]
    for name in known:
        other: Any = known | {name: 9}
        with pytest.raises(ArgumentError, match=r"^model: \w+ is \d+ in config.json, and 9 at"):
            _compare_config(Config, ServedModel("m", **other))


@pytest.mark.parametrize("model", ["/nonexistent", "", "a//b", 5, None, Path("/nonexistent")])
def test_model_that_is_no_folder_is_refused(model: Any) -> None:
    with pytest.raises(ModelSourceError, match=r"^model: .*allowed: a folder, owner/name of a hub"):
        AutoDistributedModelForCausalLM.from_pretrained(model)


def test_folder_without_a_whole_config_is_refused(tmp_path: Path) -> None:
    load = AutoDistributedModelForCausalLM.from_pretrained
    with pytest.raises(ModelSourceError, match=r"has no config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelSourceError, match=r"config.json cannot be read: "):
        load(tmp_path)


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        (
            "failed to connect to all addresses; last error: ipv4:127.0.0.1:1: Connection refused",
            "no gateway answers gRPC at h:1: nothing listens there; allowed: ",
        ),
        ("got frame type 80", "no gateway answers gRPC at h:1: it speaks HTTP/1"),
        ("SSL_ERROR_SSL: WRONG_VERSION_NUMBER", "no gateway answers gRPC at h:1: it has no TLS"),
        ("Stream removed", "no gateway answers gRPC at h:1; allowed: "),
    ],
)
def test_lost_connection_is_one_sentence(details: str, sentence: str) -> None:
    assert str(translate(failed(grpc.StatusCode.UNAVAILABLE, details), "h:1")).startswith(sentence)


def test_call_without_room_says_what_to_do() -> None:
    for told in ("no free KV", "all sessions are in use; try again later"):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        found = str(translate(failed(code, told, ("error-code", "no_capacity")), "h:1"))
        advice = "; close other sessions, ask for fewer positions, or retry in 1 s"
        assert found == (told if "again" in told else told + advice)


def failed(status: grpc.StatusCode, told: str, *trailing: tuple[str, str]) -> grpc.RpcError:
    class Failed(grpc.RpcError):
        @override
        def code(self) -> Any:
            return status

        @override
        def details(self) -> str:
            return told

        @override
        def trailing_metadata(self) -> Any:
            return trailing

    return Failed()


def test_right_padding_is_refused_without_a_mask_too() -> None:
    """The last logits of such a row would be those of padding, all zeros."""
    ids = torch.tensor([[65, 12, 3, 3], [90, 91, 92, 93]])
    with pytest.raises(ArgumentError, match=r"^attention_mask: a row ends with padding"):
        infer_mask(ids, 3, [5])
    found = infer_mask(ids.flip(-1), 3, [5])
    assert found is not None and found.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
