"""Llama models of the benchmark shapes with random weights, made once per machine in a cache folder.

`python -m bench.models SHAPE FOLDER` makes one; only this needs torch. Used by the benchmarks on one machine.
"""

from __future__ import annotations

import json
import os
import string
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
    writes_text: bool = False  # its tokens are pieces of text, and it has an end token


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("27m", 512, 8, 8, 8, 1408, 1024),  # the shape of Petals' measurements
        Shape("246m", 1024, 16, 16, 4, 2816, 32000),
        Shape("1m", 128, 8, 4, 4, 352, 512),
        Shape("59m-text", 512, 8, 8, 8, 1408, 32000, writes_text=True),
        Shape("8b-8-blocks", 4096, 8, 32, 8, 14336, 128256, "bfloat16"),  # of Llama 3.1 8B's 32
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
    model.generation_config.eos_token_id = shape.vocab - 1 if shape.writes_text else None
    model.to(getattr(torch, shape.dtype)).save_pretrained(folder, max_shard_size="10GB")
    if shape.writes_text:
        write_text_tokenizer(shape.vocab, folder)
        return
    vocabulary = {f"t{index}": index for index in range(shape.vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
    )


def write_text_tokenizer(size: int, folder: Path) -> None:
    """Write a byte-level tokenizer: all bytes, pieces of two to four characters, and an end token as the last one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_lowercase
    vocabulary = {name: n for n, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    pieces = list("\u0120" + string.ascii_letters + string.digits + '"{}[]:,')
    followers = letters + string.digits + '"{}[]:,'
    for _ in range(3):
        longer = []
        for piece in pieces:
            for follower in followers:
                if len(vocabulary) < size - 1 and piece + follower not in vocabulary:
                    vocabulary[piece + follower] = len(vocabulary)
                    merges.append((piece, follower))
                    longer.append(piece + follower)
        pieces, followers = longer, letters
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    assert tokenizer.get_vocab_size() == size
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


if __name__ == "__main__":
    make_model(SHAPES[sys.argv[1]], Path(sys.argv[2]))
