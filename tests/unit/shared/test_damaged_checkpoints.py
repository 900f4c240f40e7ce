"""Model folders that cannot be served: `plan`, the operator's inspection and each server report the same error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.models.tiny_models import BLOCKS, make_model, write_tokenizer
from support.processes.swarm import write_document
from transformers import AutoConfig
from transformers.activations import ACT2FN

from modelswarm.checkpoint.config.fields import Fields
from modelswarm.checkpoint.families.table import ACTIVATIONS, FAMILIES
from modelswarm.checkpoint.inspection import REFUSED, inspect_model
from modelswarm.checkpoint.inspection import main as inspection
from modelswarm.cli import run
from modelswarm.errors import ModelSourceError
from modelswarm_serving.app import load
from modelswarm_serving.settings import parse_settings

Damage = Callable[[Path], object]

UNQUANTISED = (
    "quantised checkpoints are not served, allowed are weights in float32, bfloat16 or float16"
)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model in one file, so that each damage is in `model.safetensors`."""
    return make_model(tmp_path_factory.mktemp("tiny"), "llama", shard_size="1GB")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def config(**changes: Any) -> Damage:
    """Change config.json; `...` removes a field."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        fields = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))

    return change


def rope(**values: Any) -> Damage:
    return config(rope_parameters={"rope_theta": 10000.0, **values})


def content(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the tensors of the only file."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path, {"format": "pt"})

    return rewrite


def stored_as(kind: str) -> Damage:
    import torch

    return tensors(lambda found: found.update({Q_PROJ: found[Q_PROJ].to(getattr(torch, kind))}))


def header(change: Callable[[bytes], bytes]) -> Damage:
    """Change the header of the only file without changing its length."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        path.write_bytes(data[:8] + change(data[8 : 8 + size]) + data[8 + size :])

    return rewrite


def index(weight_map: Any) -> Damage:
    return content("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())


def index_alone(weight_map: Any) -> Damage:
    """Write an index, and remove the only file."""

    def rewrite(folder: Path) -> None:
        index(weight_map)(folder)
        removed("model.safetensors")(folder)

    return rewrite


FIELD = "{folder}/config.json: "
FILE = "{folder}/model.safetensors"
CASES: list[tuple[str, Damage, str]] = [
    # config.json as a file
    ("no config", removed("config.json"), "{folder} has no config.json"),
    ("no JSON", content("config.json", b"{"), "{folder}/config.json is not valid JSON: "),
    ("no UTF-8", content("config.json", b"\xff\xfe"), "{folder}/config.json is not valid JSON: "),
    ("no object", content("config.json", b"[]"), "{folder}/config.json must hold a JSON object"),
    ("nested", content("config.json", b"[" * 99999), "{folder}/config.json is not valid JSON: "),
    # quantized
    (
        "gptq",
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        FIELD + f"quantization_config.quant_method is 'gptq'; {UNQUANTISED}",
    ),
    (
        "fp8",
        config(quantization_config={"quant_method": "fp8"}),
        FIELD + f"quantization_config.quant_method is 'fp8'; {UNQUANTISED}",
    ),
    (
        "bitsandbytes without a method",
        config(quantization_config={"load_in_4bit": True}),
        FIELD + "quantization_config is {{'load_in_4bit': True}}; " + UNQUANTISED,
    ),
    (
        "compressed-tensors",
        config(compression_config={"quant_method": "compressed-tensors"}),
        FIELD + f"compression_config.quant_method is 'compressed-tensors'; {UNQUANTISED}",
    ),
    (
        "mlx",
        config(quantization={"bits": 4, "group_size": 64}),
        FIELD + "quantization is {{'bits': 4, 'group_size': 64}}; " + UNQUANTISED,
    ),
    (
        "float8 without a config",
        stored_as("float8_e4m3fn"),
        "{folder}: " + f"{Q_PROJ} in model.safetensors is stored as F8_E4M3; {UNQUANTISED}",
    ),
    (
        "int8 without a config",
        stored_as("int8"),
        "{folder}: " + f"{Q_PROJ} in model.safetensors is stored as I8; {UNQUANTISED}",
    ),
    # unknown
    (
        "model type",
        config(model_type="mamba"),
        (
            f"{FIELD}model_type is 'mamba'; allowed are {', '.join(sorted(FAMILIES))}; "
            "docs/reference/adding-a-model-family.md says how to add one"
        ),
    ),
    ("no model type", config(model_type=...), FIELD + "model_type is None; allowed are "),
    (
        "architecture",
        config(architectures=["LlamaForSequenceClassification"]),
        FIELD + "architectures is ['LlamaForSequenceClassification']; "
        "allowed for llama is ['LlamaForCausalLM']",
    ),
    (
        "remote code",
        config(auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
        FIELD + "auto_map.AutoModelForCausalLM is 'modeling_x.X'; code of a checkpoint is not run, "
        "allowed are the classes of transformers",
    ),
    ("activation", config(hidden_act="nope"), FIELD + "hidden_act is 'nope'; allowed are gelu, "),
    (
        "layer types",
        config(layer_types=["full_attention"] * 3 + ["linear_attention"]),
        FIELD + "layer_types is 'linear_attention'; allowed are full_attention",
    ),
    (
        "rope type",
        rope(rope_type="dynamic", factor=2.0),
        FIELD + "rope_parameters.rope_type is 'dynamic'; allowed are default, linear, llama3, yarn",
    ),
    (
        "older rope type",
        config(rope_parameters=..., rope_scaling={"type": "su", "factor": 2.0}),
        FIELD + "rope_scaling.rope_type is 'su'; allowed are default, linear, llama3, yarn",
    ),
    (
        "unknown rope key",
        rope(rope_type="linear", factor=2.0, stretch=3),
        FIELD + "rope_parameters.stretch is 3; allowed for rope_type 'linear' are factor, ",
    ),
    (
        "rope without a factor",
        rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0),
        FIELD + "rope_parameters.high_freq_factor is None; rope_type 'llama3' needs a number",
    ),
    (
        "rope factor",
        rope(rope_type="yarn", factor="4"),
        FIELD + "rope_parameters.factor is '4'; allowed is a number of at least 1",
    ),
    (
        "partial rotary",
        config(partial_rotary_factor=0.5),
        FIELD + "partial_rotary_factor is 0.5; allowed is 1, as whole heads are rotated",
    ),
    (
        "bidirectional",
        config(use_bidirectional_attention=True),
        FIELD + "use_bidirectional_attention is True; allowed is false",
    ),
    ("layers", config(per_layer_config={"0": {"a": 1}}), FIELD + "per_layer_config is {{'0'"),
    ("not causal", config(is_causal=False), FIELD + "is_causal is False; allowed is true"),
    # inconsistent
    (
        "heads",
        config(num_attention_heads=3, head_dim=...),
        FIELD + "num_attention_heads is 3; allowed are divisors of hidden_size, 64",
    ),
    (
        "key/value heads",
        config(num_key_value_heads=3),
        FIELD + "num_key_value_heads is 3; allowed are divisors of num_attention_heads, 4",
    ),
    (
        "odd heads",
        config(head_dim=15),
        FIELD + "head_dim is 15; allowed are even numbers, as rotary positions need pairs",
    ),
    (
        "text for a number",
        config(hidden_size="64"),
        FIELD + "hidden_size is '64'; allowed is a positive integer",
    ),
    (
        "epsilon",
        config(rms_norm_eps=float("nan")),
        FIELD + "rms_norm_eps is nan; allowed is a number above 0",
    ),
    (
        "flag",
        config(attention_bias="yes"),
        FIELD + "attention_bias is 'yes'; allowed is true or false",
    ),
    (
        "token id",
        config(eos_token_id="</s>"),
        FIELD + "eos_token_id is '</s>'; allowed is a token id or a list of them",
    ),
    (
        "fewer layers",
        config(num_hidden_layers=3),
        FIELD + "num_hidden_layers is 3; allowed is 4, the number of blocks that the files hold",
    ),
    (
        "more layers",
        config(num_hidden_layers=5),
        FIELD + "num_hidden_layers is 5; allowed is 4, the number of blocks that the files hold",
    ),
    (
        "more layers than a gateway plans",
        config(num_hidden_layers=4097),
        FIELD + "num_hidden_layers is 4097; allowed are at most 4096",
    ),
    (
        "other width",
        config(intermediate_size=80),
        (
            "{folder}: model.layers.0.mlp.down_proj.weight in model.safetensors has shape [64, 96], "
            "but config.json says [hidden_size 64, intermediate_size 80]"
        ),
    ),
    (
        "vocabulary above the embedding",
        config(vocab_size=400),
        (
            "{folder}: lm_head.weight in model.safetensors has shape [320, 64], "
            "but config.json says [vocab_size 400, hidden_size 64]"
        ),
    ),
    (
        "bias without a flag",
        tensors(
            lambda found: found.update({Q_PROJ.replace("weight", "bias"): found[NORM].clone()})
        ),
        (
            "{folder}: model.layers.0.self_attn.q_proj.bias in model.safetensors is no tensor of a "
            "llama model with this config.json"
        ),
    ),
    (
        "flag without a bias",
        config(attention_bias=True),
        "{folder} has no weights for model.layers.0.self_attn.q_proj.bias",
    ),
    ("no norm", tensors(lambda found: found.pop(NORM)), "{folder} has no weights for " + NORM),
    # files of weights
    (
        "no weights",
        removed("model.safetensors"),
        "{folder} has no model.safetensors (safetensors weights are needed)",
    ),
    (
        "truncated",
        lambda folder: (path := folder / "model.safetensors").write_bytes(
            path.read_bytes()[:-1000]
        ),
        FILE + " is truncated: 1000 bytes are missing",
    ),
    (
        "longer",
        lambda folder: (path := folder / "model.safetensors").write_bytes(
            path.read_bytes() + b"x" * 10
        ),
        FILE + " has 10 bytes after its last tensor",
    ),
    ("empty", content("model.safetensors", b""), FILE + " is truncated or not a safetensors file"),
    (
        "shapes that do not fit the data",
        header(lambda text: text.replace(b"[320,64]", b"[32,640]")),
        (
            "{folder}: lm_head.weight in model.safetensors has shape [32, 640], "
            "but config.json says [vocab_size 320, hidden_size 64]"
        ),
    ),
    (
        "more elements than data",
        header(lambda text: text.replace(b"[320,64]", b"[321,64]")),
        FILE + " is not a safetensors file",
    ),
    ("index without a map", index(None), "{folder}/model.safetensors.index.json has no weight_map"),
    (
        "index outside of the folder",
        index({Q_PROJ: "/etc/passwd"}),
        "{folder}/model.safetensors.index.json has '/etc/passwd' as the file of '" + Q_PROJ,
    ),
    *(
        (
            f"index with {name}",
            index({Q_PROJ: name}),
            (
                f"{{folder}}/model.safetensors.index.json has {name!r} as the file of '{Q_PROJ}'; "
                "allowed are names such as model-00001-of-00002.safetensors"
            ),
        )
        for name in (
            *("*", "*.safetensors", "[a-z]*.safetensors", "model?.safetensors", "tokenizer.json"),
            *("../x.safetensors", "a/../../x.safetensors", "sub/x.safetensors", ".safetensors"),
            *("model.safetensors\n", "model.SAFETENSORS", 7, None),
        )
    ),
    (
        "index of a missing file",
        index_alone({f"model.layers.{b}.x": f"{b}.safetensors" for b in range(BLOCKS)}),
        "{folder} has no 0.safetensors (safetensors weights are needed)",
    ),
    # the tokenizer's files
    (
        "no tokenizer",
        removed("tokenizer.json"),
        "{folder} has no tokenizer.json; a fast tokenizer is needed",
    ),
    (
        "broken tokenizer",
        content("tokenizer.json", b"{}"),
        "{folder}/tokenizer.json is not a tokenizer: ",
    ),
    (
        "tokenizer settings",
        content("tokenizer_config.json", b"{"),
        "{folder}/tokenizer_config.json is not valid JSON: ",
    ),
    (
        "generation settings",
        content("generation_config.json", b"3"),
        "{folder}/generation_config.json must hold a JSON object",
    ),
]


@dataclass(frozen=True)
class Planned:
    """The outcome of `modelswarm plan`."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Planned]:
    def run_plan(folder: Path, **spec: Any) -> Planned:
        document = write_document(tmp_path / "swarm.yaml", folder, **spec)
        code = run(["plan", str(document)])
        printed = capsys.readouterr()
        return Planned(code, printed.out, printed.err)

    return run_plan


def server_refusal(folder: Path) -> str:
    """Return a server's error at its start."""
    with pytest.raises(ModelSourceError) as caught:
        load(parse_settings(["--model", str(folder), "--blocks", f"0:{BLOCKS}", "--name", "s"]))
    return str(caught.value)


@pytest.mark.parametrize(("damage", "sentence"), [pytest.param(d, s, id=n) for n, d, s in CASES])
def test_damaged_folder_is_refused_in_one_sentence(
    copy: Path, plan: Callable[..., Planned], damage: Damage, sentence: str
) -> None:
    damage(copy)

    done = plan(copy)

    assert (done.code, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"Error: model: {sentence.format(folder=copy)}")
    assert f"Error: {server_refusal(copy)}" == line
    inspected = CliRunner().invoke(inspection, ["--model", str(copy)])  # the operator's pod
    assert inspected.exit_code == REFUSED
    assert inspected.stdout == f"{line.removeprefix('Error: model: ')}\n"


def test_tokenizer_beyond_the_vocabulary_is_refused_by_both(
    tmp_path: Path, plan: Callable[..., Planned]
) -> None:
    small = make_model(tmp_path / "small", "llama", vocab=64)
    write_tokenizer(small, 100)
    expected = (
        f"model: vocab_size in config.json is 64, but {small}/tokenizer.json has ids up to 99; "
        "allowed is a vocab_size of at least 100"
    )
    assert plan(small) == Planned(2, "", f"Error: {expected}\n")
    assert server_refusal(small) == expected


@pytest.mark.parametrize("in_settings", [False, True])
def test_template_that_does_not_compile_is_a_warning(
    copy: Path, plan: Callable[..., Planned], in_settings: bool
) -> None:
    template = "{# one #}\n{% for m in %}"
    name = "tokenizer_config.json" if in_settings else "chat_template.jinja"
    if in_settings:
        settings = json.loads((copy / name).read_text()) | {"chat_template": template}
        (copy / name).write_text(json.dumps(settings))
    else:
        (copy / name).write_text(template)

    done = plan(copy)

    assert done.code == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith(
        f"warning: {copy}/{name}: the chat template does not compile: line 2: Expected an expression"
    )
    assert first.endswith(
        "text completions work, chats are refused until spec.model.chatTemplate replaces it"
    )
    own = {"source": f"file://{copy}", "chatTemplate": "{{ 1 }}"}
    assert "warning" not in plan(copy, model=own).stdout
    assert len(inspect_model(str(copy)).warnings) == 1


def test_allowed_activations_are_known_to_transformers() -> None:
    assert set(ACT2FN) >= ACTIVATIONS


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_defaults_of_families_are_those_of_transformers(model_type: str) -> None:
    theirs: Any = AutoConfig.for_model(model_type)
    theirs = getattr(theirs, "text_config", theirs) or theirs
    fields = Fields(Path(), FAMILIES[model_type], {"hidden_size": theirs.hidden_size})
    for name, default in fields.family.defaults.items():
        if (model_type, name) == ("bloom", "max_position_embeddings"):
            assert not hasattr(theirs, name)  # transformers has no limit for ALiBi
        elif isinstance(default, str):  # transformers computes it later
            assert getattr(theirs, name, None) in (None, fields.integer(name)), name
        else:
            assert getattr(theirs, name) == default, name
    assert {"max_position_embeddings", "vocab_size"} <= fields.family.defaults.keys()
    assert theirs.num_attention_heads == fields.integer("num_attention_heads")
    own = theirs.hidden_size // theirs.num_attention_heads
    assert (getattr(theirs, "head_dim", None) or own) == fields.head_size()
    assert theirs.tie_word_embeddings == fields.family.tied
    assert fields.family.has_window == hasattr(theirs, "sliding_window")
    assert not fields.family.activation or hasattr(theirs, fields.family.activation)
