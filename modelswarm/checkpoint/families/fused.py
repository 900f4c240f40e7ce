"""The Llama-like families, whose blocks run in the fused form (`fusion.py` of the server)."""

from __future__ import annotations

from dataclasses import replace

from modelswarm.checkpoint.families.family import (
    ALL_BIAS,
    ATTENTION,
    HEAD_NORMS,
    MLP,
    MLP_BIAS,
    NORMS,
    QKV_BIAS,
    BlockPath,
    Family,
    Shapes,
)

_PARTIAL = ("partial rotation of heads",)
_OUTER_NORMS: Shapes = {
    **NORMS,
    "pre_feedforward_layernorm.weight": "hidden_size",
    "post_feedforward_layernorm.weight": "hidden_size",
}

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "intermediate_size": 11008,
    },
    block={**ATTENTION, **MLP, **NORMS},
    optional={"attention_bias": ALL_BIAS, "mlp_bias": MLP_BIAS},
    path=BlockPath.FUSED,
    heads_divide_hidden=True,
    has_window=False,
    refused=_PARTIAL,
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 22016,
    },
    block={**ATTENTION, **QKV_BIAS, **MLP, **NORMS},
    path=BlockPath.FUSED,
    is_windowed=True,
    refused=_PARTIAL,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
    },
    block={**ATTENTION, **HEAD_NORMS, **MLP, **NORMS},
    optional={"attention_bias": ALL_BIAS},
    path=BlockPath.FUSED,
    refused=_PARTIAL,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
    block={**ATTENTION, **MLP, **NORMS},
    path=BlockPath.FUSED,
    absent=("layer_types",),
    refused=(*_PARTIAL, "windows in some blocks only (`layer_types`), as in Ministral 8B"),
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    defaults={
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
    },
    block={**ATTENTION, **MLP, **_OUTER_NORMS},
    optional={"attention_bias": ALL_BIAS},
    path=BlockPath.FUSED,
    tied=True,
    activation="hidden_activation",
    is_windowed=True,
    has_score_tables=True,
    refused=_PARTIAL,
)
GEMMA3 = Family(
    "gemma3",
    "Gemma3ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
    },
    block={**ATTENTION, **HEAD_NORMS, **MLP, **_OUTER_NORMS},
    optional={"attention_bias": ALL_BIAS},
    path=BlockPath.FUSED,
    tied=True,
    activation="hidden_activation",
    is_windowed=True,
    refused=(*_PARTIAL, "images"),
)
FUSED_FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": replace(GEMMA3, architecture="Gemma3ForConditionalGeneration", nested=True),
}
"""`model_type` of config.json -> family."""
