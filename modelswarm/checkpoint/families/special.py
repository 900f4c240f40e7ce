"""Families whose attention is unlike that of the others: latent keys and values (DeepSeek), sinks (GPT-OSS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelswarm.checkpoint.families.family import (
    ALL_BIAS,
    ATTENTION,
    MLP,
    NORMS,
    Family,
    Shapes,
)

_QUERY_SIZE = "num_attention_heads*qk_nope_head_dim+num_attention_heads*qk_rope_head_dim"
_VALUE_ROWS = "num_attention_heads*v_head_dim"
_SHARED = "n_shared_experts*moe_intermediate_size"
_EXPERTS: Shapes = {
    "mlp.gate.weight": "n_routed_experts hidden_size",
    "mlp.experts.*.gate_proj.weight": "moe_intermediate_size hidden_size",
    "mlp.experts.*.up_proj.weight": "moe_intermediate_size hidden_size",
    "mlp.experts.*.down_proj.weight": "hidden_size moe_intermediate_size",
    "mlp.shared_experts.gate_proj.weight": f"{_SHARED} hidden_size",
    "mlp.shared_experts.up_proj.weight": f"{_SHARED} hidden_size",
    "mlp.shared_experts.down_proj.weight": f"hidden_size {_SHARED}",
}


def _one_group(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of a router that has none: all experts are in one."""
    is_greedy = values.get("topk_method", "greedy") == "greedy"
    return {"n_group": 1, "topk_group": 1} if is_greedy else {}


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "vocab_size": 102400,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": "qk_rope_head_dim",  # the part of a head that is rotated
    },
    block={
        "self_attn.kv_a_proj_with_mqa.weight": "kv_lora_rank+qk_rope_head_dim hidden_size",
        "self_attn.kv_a_layernorm.weight": "kv_lora_rank",
        "self_attn.kv_b_proj.weight": (
            f"num_attention_heads*qk_nope_head_dim+{_VALUE_ROWS} kv_lora_rank"
        ),
        "self_attn.o_proj.weight": f"hidden_size {_VALUE_ROWS}",
        **NORMS,
    },
    optional={
        "q_lora_rank": {
            "self_attn.q_a_proj.weight": "q_lora_rank hidden_size",
            "self_attn.q_a_layernorm.weight": "q_lora_rank",
            "self_attn.q_b_proj.weight": f"{_QUERY_SIZE} q_lora_rank",
        },
        "!q_lora_rank": {"self_attn.q_proj.weight": f"{_QUERY_SIZE} hidden_size"},
    },
    mlp=MLP,
    experts=_EXPERTS,
    expert_count="n_routed_experts",
    ranked_experts=1,
    has_experts=lambda values, block: block >= (values.get("first_k_dense_replace") or 0),
    kv="kv_lora_rank+qk_rope_head_dim",
    is_latent=True,
    is_ported=True,
    derive=_one_group,
    limits={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
    refused=("FP8 weights",),
    has_window=False,
)


def _follows_dense(values: Mapping[str, Any], block: int) -> bool:
    """True if a block of DeepSeek-V3 has experts."""
    first = values.get("first_k_dense_replace")
    return bool(block >= (3 if first is None else first))


DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **DEEPSEEK_V2.defaults,
        "max_position_embeddings": 4096,
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
    },
    experts={**_EXPERTS, "mlp.gate.e_score_correction_bias": "n_routed_experts"},
    ranked_experts=2,
    has_experts=_follows_dense,
    derive=lambda _values: {},
    limits={"attention_bias": (False,), "mlp_bias": (False,)},
    spare_blocks="num_nextn_predict_layers",
    refused=("FP8 weights", "prediction of several tokens: its block is left out"),
)


def _groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of groups of 32 weights with one scale in MXFP4."""
    found = {}
    for name in ("hidden_size", "intermediate_size"):
        value = values.get(name)
        found[f"{name}/32"] = value // 32 if isinstance(value, int) else None
    return found


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "vocab_size": 201088,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    },
    block={**ATTENTION, "self_attn.sinks": "num_attention_heads", **NORMS},
    optional={
        "attention_bias": ALL_BIAS,
        "quantization_config": {
            "mlp.experts.gate_up_proj_blocks": (
                "num_experts 2*intermediate_size hidden_size/32 16"
            ),
            "mlp.experts.gate_up_proj_scales": "num_experts 2*intermediate_size hidden_size/32",
            "mlp.experts.down_proj_blocks": "num_experts hidden_size intermediate_size/32 16",
            "mlp.experts.down_proj_scales": "num_experts hidden_size intermediate_size/32",
        },
        "!quantization_config": {
            "mlp.experts.gate_up_proj": "num_experts hidden_size 2*intermediate_size",
            "mlp.experts.down_proj": "num_experts intermediate_size hidden_size",
        },
    },
    experts={
        "mlp.router.weight": "num_experts hidden_size",
        "mlp.router.bias": "num_experts",
        "mlp.experts.gate_up_proj_bias": "num_experts 2*intermediate_size",
        "mlp.experts.down_proj_bias": "num_experts hidden_size",
    },
    expert_count="num_experts",
    aliases={"num_experts": ("num_local_experts",)},
    derive=_groups,
    quantisation="mxfp4",
    is_windowed=True,
    has_score_tables=True,
)
SPECIAL_FAMILIES = {family.name: family for family in (DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)}
"""`model_type` of config.json -> family."""
