"""Llama models of the benchmark shapes with random weights, made once per machine in a cache folder.

`python -m bench.models SHAPE FOLDER` makes one; only this needs torch. Used by the benchmarks on one machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CACHE_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "modelswarm-bench"


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    dtype: str = "float32"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("27m", 512, 8, 8, 8, 1408, 1024),  # the shape of Petals' measurements
        Shape("246m", 1024, 16, 16, 4, 2816, 32000),
        Shape("1m", 128, 8, 4, 4, 352, 512),
        Shape("8b-span", 4096, 8, 32, 8, 14336, 32000, "bfloat16"),  # a quarter of Llama 3.1 8B
    )
}


def model_folder(name: str) -> Path:
    """Return the Hugging Face folder of a shape; make it first if it is missing."""
    folder = CACHE_FOLDER / f"{name}-v1"
    if not (folder / "model.safetensors").exists():
        subprocess.run([sys.executable, "-m", "bench.models", name, str(folder)], check=True)
    return folder


def make_model(shape: Shape, folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.to(getattr(torch, shape.dtype)).save_pretrained(folder, max_shard_size="10GB")
    vocabulary = {f"t{index}": index for index in range(shape.vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
    )


if __name__ == "__main__":
    make_model(SHAPES[sys.argv[1]], Path(sys.argv[2]))
