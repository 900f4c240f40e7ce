"""The classes of `modelswarm`: one for each family, typed for users, and Petals' others refused by a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import modelswarm
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.client.hf.auto import family_classes
from modelswarm.client.hf.errors import UnsupportedArgumentError
from modelswarm.client.sessions.errors import ConnectionLostError
from modelswarm.errors import UserError

AUTO = "AutoDistributedModelForCausalLM"
NOWHERE = "127.0.0.1:1"


def write_config(folder: Path, model_type: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_each_family_has_one_class_with_transformers_name() -> None:
    names = {f"Distributed{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[each]}" for each in FAMILIES}
    classes = family_classes()
    assert classes.keys() == names
    assert sorted(each for found in classes.values() for each in found.model_types) == sorted(
        FAMILIES
    )
    for name, found in classes.items():
        assert getattr(modelswarm, name) is found
        for model_type in found.model_types:
            assert name == f"Distributed{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]}"


def test_all_classes_are_listed_for_users() -> None:
    names = {AUTO, *family_classes()}
    assert names <= set(modelswarm.__all__)
    assert names <= set(dir(modelswarm))
    for name in modelswarm.__all__:
        assert getattr(modelswarm, name) is not None


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_class_takes_its_family_and_refuses_others(tmp_path: Path, model_type: str) -> None:
    """A model of the family is asked for at the gateway, and there is none."""
    folder = write_config(tmp_path, model_type)
    classes: list[Any] = [modelswarm.AutoDistributedModelForCausalLM, *family_classes().values()]
    for found in classes:
        is_own = model_type in found.model_types
        error: type[Exception] = ConnectionLostError if is_own else UserError
        sentence = "no gateway answers" if is_own else f"model_type '{model_type}'; allowed here: "
        with pytest.raises(error, match=sentence):
            found.from_pretrained(folder, gateway=NOWHERE)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("AutoDistributedConfig", f"arguments of {AUTO}.from_pretrained"),
        ("DistributedLlamaConfig", f"arguments of {AUTO}.from_pretrained"),
        ("AutoDistributedModel", f"use {AUTO}, whose blocks"),
        ("DistributedBloomModel", f"use {AUTO}, whose blocks"),
        ("RemoteSequential", f"use {AUTO}, whose blocks"),
        ("RemoteSequenceManager", "the gateway chooses servers"),
        ("AutoDistributedModelForSequenceClassification", "a head of your own"),
        ("DistributedFalconForSequenceClassification", "a head of your own"),
        ("AutoDistributedSpeculativeModel", "an assistant_model"),
        ("DistributedLlamaForSpeculativeGeneration", "an assistant_model"),
        ("DistributedBertForCausalLM", "served families: DistributedBloomForCausalLM, "),
    ],
)
def test_other_class_of_petals_is_refused_by_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ImportError, match=f"^modelswarm has no {name}[:;] .*{sentence}"):
        exec(f"from modelswarm import {name}", {})


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(modelswarm, "Petals")
    assert not hasattr(modelswarm, "RemoteThing")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("initial_peers", ["/ip4/1.2.3.4"]),
        ("dht_prefix", "bloom"),
        ("daemon_startup_timeout", 60),
        ("allowed_servers", ["12D3"]),
        ("blocked_servers", ["12D3"]),
        ("connect_timeout", 5),
        ("request_timeout", 180),
        ("max_retries", 3),
        ("min_backoff", 1),
        ("max_backoff", 60),
        ("ban_timeout", 15),
        ("update_period", 60),
        ("max_pinged", 3),
        ("ping_timeout", 2),
        ("show_route", True),
        ("use_server_to_server", False),
        ("compression", "FLOAT16"),
        ("use_chunked_forward", True),
        ("quant_type", "nf4"),
        ("use_auth_token", True),
    ],
)
def test_option_of_petals_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    load = modelswarm.AutoDistributedModelForCausalLM.from_pretrained
    with pytest.raises(UnsupportedArgumentError) as refused:
        load(write_config(tmp_path, "llama"), gateway=NOWHERE, **{name: value})
    assert refused.value.field == name
    assert "it has no effect here" not in str(refused.value)


def test_names_are_known_before_torch_is_imported() -> None:
    script = f"""
import sys
import modelswarm
assert {AUTO!r} in dir(modelswarm) and "DistributedLlamaForCausalLM" in modelswarm.__all__
try:
    from modelswarm import AutoDistributedConfig
except ImportError as error:
    assert "arguments of" in str(error)
assert not {{"torch", "transformers", "grpc"}} & set(sys.modules), "imported too early"
"""
    made = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("name", ["revision", "token", "cache_dir", "local_files_only"])
def test_option_beside_an_address_is_refused(name: str) -> None:
    """It would be left out, and another revision's weights would be trained with."""
    load, options = modelswarm.AutoDistributedModelForCausalLM.from_pretrained, dict[str, Any]()
    options[name] = "v2"
    for address in ("hf://modelswarm/none", "demo://counting"):
        with pytest.raises(UnsupportedArgumentError, match=f"^{name}: an address has its revision"):
            load(address, gateway=NOWHERE, **options)
