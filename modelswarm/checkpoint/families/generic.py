"""Families with rotary positions whose blocks run by transformers' own forward: dense ones, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelswarm.checkpoint.families.family import (
    ALL_BIAS,
    ATTENTION,
    HEAD_NORMS,
    KEY_ROWS,
    MLP,
    MLP_BIAS,
    NORMS,
    QKV_BIAS,
    QUERY_ROWS,
    Family,
    Shapes,
    Tables,
    biased,
)

_EXPERTS: Shapes = {
    "mlp.gate.weight": "num_experts hidden_size",
    "mlp.experts.*.gate_proj.weight": "moe_intermediate_size hidden_size",
    "mlp.experts.*.up_proj.weight": "moe_intermediate_size hidden_size",
    "mlp.experts.*.down_proj.weight": "hidden_size moe_intermediate_size",
}
_SHARED_EXPERT: Shapes = {
    "mlp.shared_expert.gate_proj.weight": "shared_expert_intermediate_size hidden_size",
    "mlp.shared_expert.up_proj.weight": "shared_expert_intermediate_size hidden_size",
    "mlp.shared_expert.down_proj.weight": "hidden_size shared_expert_intermediate_size",
    "mlp.shared_expert_gate.weight": "1 hidden_size",
}
_GATE_UP: Shapes = {
    "mlp.gate_up_proj.weight": "2*intermediate_size hidden_size",
    "mlp.down_proj.weight": "hidden_size intermediate_size",
}


def _is_sparse(values: Mapping[str, Any], block: int) -> bool:
    """True if a block of Qwen's mixtures has experts."""
    step = values.get("decoder_sparse_step") or 1
    return block not in (values.get("mlp_only_layers") or ()) and (block + 1) % step == 0


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    block={**ATTENTION, **NORMS},
    experts={
        "block_sparse_moe.gate.weight": "num_experts hidden_size",
        "block_sparse_moe.experts.*.w1.weight": "intermediate_size hidden_size",
        "block_sparse_moe.experts.*.w2.weight": "hidden_size intermediate_size",
        "block_sparse_moe.experts.*.w3.weight": "intermediate_size hidden_size",
    },
    expert_count="num_experts",
    aliases={"num_experts": ("num_local_experts",)},
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
        "use_sliding_window": False,
    },
    block={**ATTENTION, **NORMS},
    optional={"qkv_bias": QKV_BIAS},
    mlp=MLP,
    experts={**_EXPERTS, **_SHARED_EXPERT},
    expert_count="num_experts",
    has_experts=_is_sparse,
    is_windowed=True,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "use_sliding_window": False,
    },
    block={**ATTENTION, **HEAD_NORMS, **NORMS},
    optional={"attention_bias": ALL_BIAS},
    mlp=MLP,
    experts=_EXPERTS,
    expert_count="num_experts",
    has_experts=_is_sparse,
    aliases={"num_experts": ("num_local_experts",)},
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "intermediate_size": 8192,
    },
    block={
        "self_attn.qkv_proj.weight": f"{QUERY_ROWS}+2*{KEY_ROWS} hidden_size",
        "self_attn.o_proj.weight": f"hidden_size {QUERY_ROWS}",
        **_GATE_UP,
        **NORMS,
    },
    is_ported=True,
    refused=("rope type `longrope`, so the variants of 128k positions",),
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "vocab_size": 50304,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "intermediate_size": 11008,
    },
    block={
        **ATTENTION,
        "self_attn.q_norm.weight": QUERY_ROWS,
        "self_attn.k_norm.weight": KEY_ROWS,
        **MLP,
        "post_attention_layernorm.weight": "hidden_size",
        "post_feedforward_layernorm.weight": "hidden_size",
    },
    optional={"attention_bias": ALL_BIAS},
    has_window=False,
)
GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "intermediate_size": 11008,
    },
    block={**ATTENTION, **MLP, **NORMS},
    optional={"attention_bias": ALL_BIAS, "mlp_bias": MLP_BIAS},
    has_window=False,
)
STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "vocab_size": 49152,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "intermediate_size": 12288,
        "use_bias": True,
    },
    block={
        **ATTENTION,
        "mlp.c_fc.weight": "intermediate_size hidden_size",
        "mlp.c_proj.weight": "hidden_size intermediate_size",
        **biased(NORMS),
    },
    optional={
        "use_bias": {
            **ALL_BIAS,
            "mlp.c_fc.bias": "intermediate_size",
            "mlp.c_proj.bias": "hidden_size",
        }
    },
    tables=Tables(norm=("model.norm.weight", "model.norm.bias")),
    tied=True,
)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "vocab_size": 151552,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 13696,
        "attention_bias": True,
    },
    block={
        **ATTENTION,
        **_GATE_UP,
        **NORMS,
        "post_self_attn_layernorm.weight": "hidden_size",
        "post_mlp_layernorm.weight": "hidden_size",
    },
    optional={"attention_bias": QKV_BIAS},
    has_window=False,
)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    defaults={
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
        "num_attention_heads": 64,
        "num_key_value_heads": "num_attention_heads",
        "intermediate_size": 22528,
    },
    block={**ATTENTION, **MLP, "input_layernorm.weight": "hidden_size"},
    optional={"attention_bias": ALL_BIAS},
    tied=True,
    is_windowed=True,
)
GENERIC_FAMILIES = {
    family.name: family
    for family in (
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE),
        *(PHI3, OLMO2, GRANITE, STARCODER2, GLM4, COHERE2),
    )
}
"""`model_type` of config.json -> family."""
