"""A Llama that writes a given answer to every chat, for tests of what a gateway makes of an answer's text.

Its blocks add nothing, so that the next token depends on the last one only. The answer is cut into tokens that differ
from each other; each is followed by the next, the last by the end of the text.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.models.tiny_models import EOS, make_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

_BEGIN = "<|assistant|>"
_PIECE = 3  # characters of a token, if no earlier one is the same


def make_scripted_model(
    folder: Path, answer: str, template: str, *, markers: tuple[str, ...] = ()
) -> Path:
    """Write the model. `template` ends with `<|assistant|>`. `markers` of the answer are special tokens."""
    pieces = cut_into_tokens(answer, markers)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|end|>", *alphabet, _BEGIN, *pieces]
    make_model(folder, vocab=len(names), blocks=2, hidden_size=256, max_position_embeddings=2048)
    _write_weights(folder, names, [_BEGIN, *pieces, "<|end|>"])
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names[:257])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    for name in names[257:]:
        is_special = name == _BEGIN or name in markers
        tokenizer.add_tokens([AddedToken(name, normalized=False, special=is_special)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def cut_into_tokens(answer: str, markers: tuple[str, ...]) -> list[str]:
    """Return pieces of the answer, each of which occurs once."""
    pieces: list[str] = []
    while answer:
        length = next((len(m) for m in markers if answer.startswith(m)), _PIECE)
        while answer[:length] in pieces and length < len(answer):
            length += 1
        assert answer[:length] not in pieces, f"{answer[:length]!r} occurs twice"
        pieces.append(answer[:length])
        answer = answer[length:]
    return pieces


def _write_weights(folder: Path, names: list[str], script: list[str]) -> None:
    """Make each token of the script point to the next one."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(1)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith("norm.weight"):
                tensor.fill_(1.0)
        save_file(tensors, path, metadata={"format": "pt"})
    place = {name: index for index, name in enumerate(names)}
    embedding = torch.randn(len(names), 256, generator=generator)
    head = torch.randn(len(names), 256, generator=generator) * 0.01
    head[EOS] = embedding.mean(dim=0)
    for this, following in pairwise(script):
        head[place[following]] = embedding[place[this]]
    _replace(folder, {"model.embed_tokens.weight": embedding, "lm_head.weight": head})


def _replace(folder: Path, changed: dict[str, Any]) -> None:
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if changed.keys() & tensors.keys():
            tensors |= {name: changed[name] for name in changed.keys() & tensors.keys()}
            save_file(tensors, path, metadata={"format": "pt"})
