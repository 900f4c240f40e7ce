"""Small random models of every family, as complete Hugging Face folders in several shards.

For tests that compare with transformers or start real servers. Weights are drawn so large that logits differ clearly,
and rounding rarely decides a greedy pick. Also the toy, the model of the kill tests, and the count of its judged
tokens. torch takes seconds to import, so only the functions that need it import it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
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
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EVERY_HEAD = {"num_key_value_heads": 4}
_LATENT = {
    **_EVERY_HEAD,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_EXTRAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": _WINDOW},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": _WINDOW},
    "gemma2": {"head_dim": 24, "sliding_window": _WINDOW, "query_pre_attn_scalar": 24},
    "gemma3": {"head_dim": 24, "sliding_window": _WINDOW, "query_pre_attn_scalar": 24},
    "mixtral": {
        "head_dim": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": _WINDOW,
    },
    "qwen2_moe": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "sliding_window": _WINDOW,
    },
    "qwen3_moe": {**_EXPERTS, "head_dim": 24, "mlp_only_layers": [2], "norm_topk_prob": True},
    "phi3": {"sliding_window": _WINDOW},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "starcoder2": {"sliding_window": _WINDOW},
    "glm4": {"head_dim": 24},
    "cohere2": {"sliding_window": _WINDOW, "logit_scale": 0.5},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True, **_EVERY_HEAD},
    "gpt_neox": _EVERY_HEAD,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2, **_EVERY_HEAD},
    "bloom": _EVERY_HEAD,
    "falcon": {"num_key_value_heads": 1},
    "falcon_new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 24,
        "sliding_window": _WINDOW,
    },
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 48,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
    },
}
TINY = tuple(_EXTRAS)
GENERIC = tuple(family for family in _EXTRAS if family not in FUSED)
_TIED = (
    "gemma2",
    "gemma3",
    "qwen2",
    "starcoder2",
    "cohere2",
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "falcon_new",
)
_ALTERNATING = ("gemma2", "gemma3", "cohere2", "gpt_oss")
_MODEL_TYPES = {"gemma3": "gemma3_text", "falcon_new": "falcon"}


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
        _MODEL_TYPES.get(family, family),
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
            "tie_word_embeddings": family in _TIED,
            **({"layer_types": _alternating(blocks)} if family in _ALTERNATING else {}),
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


def nest_as_gemma_3(text: Path, whole: Path) -> None:
    """Write the same weights under the names and the configuration of the model with images."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(text, whole)
    config = json.loads((text / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": config, "tie_word_embeddings": True}
    (whole / "config.json").write_text(json.dumps(outer))
    renamed: dict[str, str] = {}
    for shard in whole.glob("*.safetensors"):
        tensors = {f"language_model.{name}": t for name, t in load_file(shard).items()}
        tensors |= {"vision_tower.layers.0.weight": torch.zeros(3)} if not renamed else {}
        renamed |= dict.fromkeys(tensors, shard.name)
        save_file(tensors, shard, {"format": "pt"})
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": renamed}))


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
            if "norm" in name or ".ln_" in name or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)


@dataclass(slots=True)
class Tally:
    """Counts of tokens that were compared with the whole model. Near ties are counted and published."""

    tokens: int = 0
    near_ties: int = 0  # picks that rounding may change
    flips: int = 0  # picks that rounding changed


JUDGED = Tally()
"""Counts of this test run; `conftest.py` prints them at the end."""
