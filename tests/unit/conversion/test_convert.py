"""`modelswarm convert`: folders from state dicts of a GPT-2 shape equal the model that wrote them."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support.models.tiny_models import VOCAB, load_whole, make_model
from typing_extensions import override

from modelswarm.cli.commands import commands
from modelswarm.errors import UserError

IDS = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100]])
LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
HEADS = ("--heads", "4")

State = dict[str, Any]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = make_model(
        tmp_path_factory.mktemp("gpt2"), "gpt2", scale_attn_by_inverse_layer_idx=False
    )
    return folder, load_whole(folder)


def convert(tmp_path: Path, content: Any, *options: str) -> Result:
    """Save the content, and convert it to the folder `out`."""
    torch.save(content, tmp_path / "state.pt")
    return convert_file(tmp_path, *options)


def convert_file(tmp_path: Path, *options: str) -> Result:
    arguments = ["convert", str(tmp_path / "state.pt"), str(tmp_path / "out"), *options]
    return CliRunner().invoke(commands, arguments)


def linear(state: State) -> State:
    """Return the state dict with the weights of torch.nn.Linear, as nanoGPT and minGPT have them."""
    return {name: each.T if name.endswith(LINEAR) else each for name, each in state.items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_state_dict_of_transformers_is_converted(tmp_path: Path, gpt2: tuple[Path, Any]) -> None:
    folder, model = gpt2
    done = convert(tmp_path, model.state_dict(), *HEADS, "--tokenizer-name", str(folder))
    assert done.exit_code == 0, done
    sizes = "4 blocks of width 64 with 4 heads, 320 tokens, 512 positions, gelu_new, float32"
    assert done.output == f"{tmp_path / 'out'}: {sizes}\n"
    assert torch.equal(logits(load_whole(tmp_path / "out")), logits(model))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "state.pt"]


def test_json_has_the_sizes_of_the_folder(tmp_path: Path, gpt2: tuple[Path, Any]) -> None:
    done = convert(tmp_path, gpt2[1].state_dict(), *HEADS, "--json")
    assert done.exit_code == 0, done
    assert json.loads(done.output) == {
        "folder": str(tmp_path / "out"), "n_blocks": 4, "width": 64, "heads": 4, "vocab_size": 320,
        "max_length": 512, "activation": "gelu_new", "dtype": "float32", "has_tokenizer": False,
    }  # fmt: skip


FORMS: dict[str, tuple[Callable[[State], Any], tuple[str, ...]]] = {
    "without the head": (
        lambda state: {name: each for name, each in state.items() if name != "lm_head.weight"},
        HEADS,
    ),
    "of the base model": (
        lambda state: {name.removeprefix("transformer."): each for name, each in state.items()},
        HEADS,
    ),
    "compiled, with buffers": (
        lambda state: {
            **{f"_orig_mod.{name}": each for name, each in state.items()},
            "_orig_mod.transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
        },
        HEADS,
    ),
    "nanoGPT": (
        lambda state: {
            "model": linear(state),
            "model_args": {"n_layer": 4, "n_head": 4, "block_size": 512},
            "config": {"n_head": 12, "dataset": "shakespeare"},
            "iter_num": 5,
            "best_val_loss": torch.tensor(1.0),
        },
        ("--activation", "gelu_new"),
    ),
    "with transformers' config": (
        lambda state: {"state_dict": state, "config": {"num_attention_heads": 4}},
        (),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_are_converted(tmp_path: Path, gpt2: tuple[Path, Any], form: str) -> None:
    make, options = FORMS[form]
    done = convert(tmp_path, make(gpt2[1].state_dict()), *options)
    assert done.exit_code == 0, done.exception
    assert torch.equal(logits(load_whole(tmp_path / "out")), logits(gpt2[1]))


def test_settings_untied_heads_and_dtypes_are_kept(tmp_path: Path) -> None:
    model = load_whole(make_model(tmp_path / "made", "gpt2", tie_word_embeddings=False))
    assert model.config.scale_attn_by_inverse_layer_idx
    done = convert(tmp_path, {"model": model.state_dict(), "config": model.config.to_dict()})
    assert done.exit_code == 0, done.exception
    loaded = load_whole(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert not loaded.config.tie_word_embeddings
    half = {name: each.bfloat16() for name, each in model.state_dict().items()}
    torch.save(half, tmp_path / "state.pt")
    again = CliRunner().invoke(
        commands, ["convert", str(tmp_path / "state.pt"), str(tmp_path / "half"), *HEADS]
    )
    assert again.output.endswith("bfloat16\n")


def test_model_without_biases_gets_zeros(tmp_path: Path, gpt2: tuple[Path, Any]) -> None:
    state = {
        name: each for name, each in gpt2[1].state_dict().items() if not name.endswith(".bias")
    }
    done = convert(tmp_path, linear(state), *HEADS, "--activation", "relu")
    assert done.exit_code == 0, done.exception
    loaded = load_whole(tmp_path / "out")
    assert loaded.config.activation_function == "relu"
    names = dict(loaded.named_parameters())
    assert all(not names[name].any() for name in names if name.endswith(".bias"))
    assert torch.equal(
        names["transformer.h.1.mlp.c_fc.weight"], state["transformer.h.1.mlp.c_fc.weight"]
    )


def changed(name: str, tensor: torch.Tensor | None) -> Callable[[State], State]:
    """Return a change of one tensor; None: it is left out."""

    def change(state: State) -> State:
        rest = {key: each for key, each in state.items() if key != name}
        return rest if tensor is None else {**rest, name: tensor}

    return change


class Code:
    """An object that would run code when it is loaded."""

    @override
    def __reduce__(self) -> Any:
        return (print, ("code of the file ran",))


BAD: dict[str, tuple[Callable[[State], Any], tuple[str, ...], str, str]] = {
    "no heads": (lambda state: state, (), "--heads", "does not say how many"),
    "wrong heads": (lambda state: state, ("--heads", "5"), "--heads", "a divisor of the width, 64"),
    "contradicted heads": (
        lambda state: {"model": state, "model_args": {"n_head": 4}},
        ("--heads", "2"),
        "--heads",
        "the file says 4",
    ),
    "no activation": (linear, HEADS, "--activation", "gelu of nanoGPT"),
    "unknown activation": (
        lambda state: {"model": state, "config": {"activation_function": "swish", "n_head": 4}},
        (),
        "--activation",
        "'swish'; allowed: gelu_new",
    ),
    "code": (lambda state: {"model": Code()}, HEADS, "STATE_DICT", "other objects than tensors"),
    "a list": (lambda state: [1, 2], HEADS, "STATE_DICT", "has a list; allowed: a state dict"),
    "no state dict": (lambda state: {"epoch": 3}, HEADS, "STATE_DICT", "has epoch; allowed"),
    "empty": (lambda state: {}, HEADS, "STATE_DICT", "has nothing; allowed"),
    "another model": (
        lambda state: {"model.embed_tokens.weight": torch.ones(2, 2)},
        HEADS,
        "STATE_DICT",
        "has no tensor wte.weight",
    ),
    "a tensor more": (
        changed("transformer.h.1.gate.weight", torch.ones(2)),
        HEADS,
        "STATE_DICT",
        "the tensor h.1.gate.weight is not one of GPT-2",
    ),
    "a tensor less": (
        changed("transformer.h.2.ln_1.bias", None),
        HEADS,
        "STATE_DICT",
        "has no tensor h.2.ln_1.bias",
    ),
    "a wrong shape": (
        changed("transformer.h.2.mlp.c_proj.weight", torch.ones(64, 64)),
        HEADS,
        "STATE_DICT",
        r"h.2.mlp.c_proj.weight has the shape \[64, 64\]",
    ),
    "a wrong first block": (
        changed("transformer.h.0.attn.c_attn.weight", torch.ones(64, 64)),
        HEADS,
        "STATE_DICT",
        "or its transpose",
    ),
    "a wrong head": (
        changed("lm_head.weight", torch.ones(5, 64)),
        HEADS,
        "STATE_DICT",
        r"lm_head.weight has the shape \[5, 64\]",
    ),
    "integers": (
        changed("transformer.ln_f.bias", torch.ones(64, dtype=torch.int64)),
        HEADS,
        "STATE_DICT",
        "allowed: all float32",
    ),
    "a tensor twice": (
        changed("wpe.weight", torch.ones(512, 64)),
        HEADS,
        "STATE_DICT",
        "has wpe.weight twice",
    ),
    "a tensor twice by a prefix": (
        changed("module.lm_head.weight", torch.ones(VOCAB, 64)),
        HEADS,
        "STATE_DICT",
        "has a tensor twice",
    ),
    "a tensor without values": (
        changed("lm_head.weight", torch.ones(VOCAB, 64, device="meta")),
        HEADS,
        "STATE_DICT",
        "allowed: dense ones",
    ),
    "heads of another kind": (
        lambda state: {"model": state, "config": {"n_head": torch.tensor([4, 4])}},
        HEADS,
        "STATE_DICT",
        "its number of heads is tensor",
    ),
    "a setting of another kind": (
        lambda state: {"model": state, "config": {"layer_norm_epsilon": torch.tensor(1e-5)}},
        HEADS,
        "STATE_DICT",
        "its layer_norm_epsilon is tensor.*; allowed: a float",
    ),
    "a setting that no server takes": (
        lambda state: {"model": state, "config": {"reorder_and_upcast_attn": True}},
        HEADS,
        "STATE_DICT",
        "cannot be served: config.json: reorder_and_upcast_attn is True; allowed is false",
    ),
    "no tokenizer": (
        lambda state: state,
        (*HEADS, "--tokenizer-name", "."),
        "model",
        "has no tokenizer.json",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(
    tmp_path: Path, gpt2: tuple[Path, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, options, field, part = BAD[name]
    done = convert(tmp_path, make(gpt2[1].state_dict()), *options)
    check_refused(tmp_path, done, field, part)
    assert "code of the file ran" not in capsys.readouterr().out


def test_folder_that_cannot_be_written_whole_is_named(
    tmp_path: Path, gpt2: tuple[Path, Any]
) -> None:
    """A limit on the size of files stands for a full disk: both end the write of the weights."""
    torch.save(gpt2[1].state_dict(), tmp_path / "state.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        done = convert_file(tmp_path, *HEADS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_refused(tmp_path, done, "FOLDER", "out cannot be written: ")
    assert [each.name for each in tmp_path.iterdir()] == ["state.pt"]


def check_refused(tmp_path: Path, done: Result, field: str, part: str) -> None:
    assert isinstance(done.exception, UserError), done.exception
    assert done.exception.field == field
    with pytest.raises(UserError, match=part):
        raise done.exception
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_examples_of_the_page_run(
    tmp_path: Path, gpt2: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.partition("\n## Conversions\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    made = make_model(tmp_path / "made", "gpt2", hidden_size=96, num_attention_heads=12)
    (tmp_path / "out").mkdir()
    torch.save(load_whole(made).state_dict(), tmp_path / "gpt2.pt")
    nano = {"model": linear(gpt2[1].state_dict()), "model_args": {"n_head": 4}}
    torch.save(nano, tmp_path / "out" / "ckpt.pt")
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines():
        arguments = line.replace("openai-community/gpt2", str(gpt2[0])).split()[1:]
        done = CliRunner().invoke(commands, arguments)
        assert done.exit_code == 0, done.exception
        assert Path(arguments[2], "tokenizer.json").is_file()
    assert load_whole(tmp_path / "shakespeare").config.activation_function == "gelu"


def test_damaged_files_and_used_folders_are_named(tmp_path: Path, gpt2: tuple[Path, Any]) -> None:
    file = tmp_path / "state.pt"
    check_refused(tmp_path, convert_file(tmp_path), "STATE_DICT", "is no file")
    for content in (b"", b"text", b"PK\x03\x04 no archive"):
        file.write_bytes(content)
        check_refused(tmp_path, convert_file(tmp_path), "STATE_DICT", "file of torch.save")
    torch.save(gpt2[1].state_dict(), file)
    file.write_bytes(file.read_bytes()[:-1000])
    check_refused(tmp_path, convert_file(tmp_path), "STATE_DICT", "no whole file of torch.save")
    (tmp_path / "out").mkdir()
    torch.save(gpt2[1].state_dict(), file)
    assert convert_file(tmp_path, *HEADS).exit_code == 0
    done = convert_file(tmp_path, *HEADS)
    assert isinstance(done.exception, UserError)
    assert "allowed: a new or an empty folder" in str(done.exception)
    assert load_whole(tmp_path / "out").config.vocab_size == VOCAB
