"""The table of families counts the weights of published models as their cards do, from their config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from modelswarm.checkpoint.block_tensors import PACKED, SCALES, plan_tensors
from modelswarm.checkpoint.config.config_checks import check_config

MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
}
QWEN3_30B = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"head_dim": 128, "moe_intermediate_size": 768, "vocab_size": 151936},
    **{"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "use_sliding_window": False, "sliding_window": None},
}
DEEPSEEK_V2_LITE = {
    **{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944},
    **{"num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512},
    **{"q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "vocab_size": 102400},
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432},
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512},
    **{"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "vocab_size": 129280, "num_nextn_predict_layers": 1},
}
GPT_OSS_20B = {
    **{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880},
    **{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"head_dim": 64, "vocab_size": 201088, "num_local_experts": 32},
    **{"num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}},
}
FALCON_40B = {
    **{"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60},
    **{"num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True},
    **{"vocab_size": 65024, "parallel_attn": True, "bias": False, "alibi": False},
}
FALCON_7B = {
    **{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32},
    **{"num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False},
    **{"vocab_size": 65024, "parallel_attn": True, "bias": False, "alibi": False},
}
BLOOM = {
    **{"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112},
    **{"vocab_size": 250880, "seq_length": 2048},
}
GPT2 = {
    **{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    **{"vocab_size": 50257, "activation_function": "gelu_new"},
}
PYTHIA_410M = {
    **{"model_type": "gpt_neox", "hidden_size": 1024, "intermediate_size": 4096},
    **{"num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50304},
    **{"rotary_pct": 0.25, "hidden_act": "gelu"},
}
OPT_125M = {
    **{"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072},
    **{"num_attention_heads": 12, "vocab_size": 50272, "word_embed_proj_dim": 768},
    **{"do_layer_norm_before": True, "_remove_final_layer_norm": False},
}
PHI_3_MINI = {
    **{"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"vocab_size": 32064, "sliding_window": 2047, "rope_scaling": None},
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
}


@pytest.mark.parametrize(
    ("config", "weights", "kv"),
    [
        pytest.param(MIXTRAL, 46_702_792_704, 2048, id="mixtral-8x7b"),
        pytest.param(QWEN3_30B, 30_532_122_624, 1024, id="qwen3-30b-a3b"),
        pytest.param(DEEPSEEK_V2_LITE, 15_706_484_224, 576, id="deepseek-v2-lite"),
        pytest.param(DEEPSEEK_V3, 671_026_419_200, 576, id="deepseek-v3"),
        pytest.param(GPT_OSS_20B, 20_914_757_184, 1024, id="gpt-oss-20b"),
        pytest.param(FALCON_40B, 41_303_293_952, 1024, id="falcon-40b"),
        pytest.param(FALCON_7B, 6_921_720_704, 128, id="falcon-7b"),
        pytest.param(BLOOM, 176_247_271_424, 28672, id="bloom"),
        pytest.param(GPT2, 124_439_808, 1536, id="gpt2"),
        pytest.param(PYTHIA_410M, 405_334_016, 2048, id="pythia-410m"),
        pytest.param(OPT_125M, 125_239_296, 1536, id="opt-125m"),
        pytest.param(PHI_3_MINI, 3_821_079_552, 6144, id="phi-3-mini"),
    ],
)
def test_weights_of_published_models_are_counted(
    config: Mapping[str, Any], weights: int, kv: int
) -> None:
    fields = check_config(config, Path("config.json"))
    plan = plan_tensors(fields)
    shapes = [
        (name, shape)
        for block in range(fields.integer("num_hidden_layers"))
        for name, shape in plan.shapes_in(block).items()
    ]
    tables = dict(plan.tables)
    if fields.family.tied:
        del tables[fields.family.tables.head]
    counted = sum(
        math.prod(size for _, size in shape) * (2 if name.endswith(PACKED) else 1)
        for name, shape in [*shapes, *tables.items()]
        if not name.endswith(SCALES)
    )
    assert (counted, plan.kv_elements) == (weights, kv)
