"""Small random models of every family, as complete Hugging Face folders in several shards.

For tests that compare with transformers or start real servers. Weights are drawn so large that logits differ clearly,
and rounding rarely decides a greedy pick. Also the toy, the model of the kill tests, and the count of its judged
tokens. torch takes seconds to import, so only the functions that need it import it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
BLOCKS = 4
VOCAB = 320
EOS = 0
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TOY_BLOCKS = 8
TOY_LENGTH = 1024  # positions of the toy's context

_WINDOW = 12  # window of the sliding families; shorter than the tests' prompts
_EXTRAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": _WINDOW},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": _WINDOW},
    "gemma2": {"head_dim": 24, "sliding_window": _WINDOW, "query_pre_attn_scalar": 24},
    "gemma3": {"head_dim": 24, "sliding_window": _WINDOW, "query_pre_attn_scalar": 24},
}


def make_model(
    folder: Path,
    family: str = "llama",
    *,
    blocks: int = BLOCKS,
    vocab: int = VOCAB,
    shard_size: str = "60KB",
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write config, weights in shards, tokenizer and generation defaults into `folder`, and return it."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig
    from transformers.utils import logging

    config = AutoConfig.for_model(
        "gemma3_text" if family == "gemma3" else family,
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": blocks,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": vocab,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
            "initializer_range": 0.2,
            "tie_word_embeddings": family in ("gemma2", "gemma3", "qwen2"),
            **({"layer_types": _alternating(blocks)} if family.startswith("gemma") else {}),
            **_EXTRAS[family],
            **changes,
        },
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(seed)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: PreTrainedModel = model_class(config)
    _spread_norms(model)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=EOS)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder, vocab)
    return folder


def make_toy(folder: Path, length: int = TOY_LENGTH) -> Path:
    """Write a random Llama. It is large enough that a long prompt takes some time."""
    return make_model(
        folder,
        blocks=TOY_BLOCKS,
        hidden_size=128,
        intermediate_size=256,
        max_position_embeddings=length,
        initializer_range=0.1,
        shard_size="1MB",
    )


def load_whole(folder: Path) -> PreTrainedModel:
    """Return the reference: transformers' own model, fp32, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole: PreTrainedModel = model.eval()
    return whole


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a byte-level tokenizer of at most `vocab` ids (id 0 ends the text) with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *alphabet][:vocab]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _alternating(blocks: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(blocks)]


def _spread_norms(model: PreTrainedModel) -> None:
    """Vary norm weights and biases. Constants would hide a norm applied twice or a bias left out."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)


@dataclass(slots=True)
class Tally:
    """Counts of tokens that were compared with the whole model. Near ties are counted and published."""

    tokens: int = 0
    near_ties: int = 0  # picks that rounding may change
    flips: int = 0  # picks that rounding changed


JUDGED = Tally()
"""Counts of this test run; `conftest.py` prints them at the end."""
