"""Families GPT-2, GPT-NeoX, OPT, BLOOM, Falcon: learned positions or ALiBi, norms with a bias, joined projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelswarm.checkpoint.families.family import (
    ALL_BIAS,
    ATTENTION,
    KEY_ROWS,
    QUERY_ROWS,
    Family,
    Shapes,
    Tables,
    biased,
)

_HEADS = "2*num_attention_heads*head_dim"
_LAYER_NORM = "hidden_size"

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    defaults={
        "max_position_embeddings": 1024,
        "vocab_size": 50257,
        "num_attention_heads": 12,
        "num_key_value_heads": "num_attention_heads",
        "n_inner": "4*hidden_size",
    },
    block={
        # stored [in, out]
        "attn.c_attn.weight": "hidden_size 3*hidden_size",
        "attn.c_attn.bias": "3*hidden_size",
        "attn.c_proj.weight": "hidden_size hidden_size",
        "attn.c_proj.bias": "hidden_size",
        "mlp.c_fc.weight": "hidden_size n_inner",
        "mlp.c_fc.bias": "n_inner",
        "mlp.c_proj.weight": "n_inner hidden_size",
        "mlp.c_proj.bias": "hidden_size",
        **biased({"ln_1.weight": _LAYER_NORM, "ln_2.weight": _LAYER_NORM}),
    },
    tables=Tables(
        blocks="transformer.h",
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        norm=("transformer.ln_f.weight", "transformer.ln_f.bias"),
    ),
    tied=True,
    kv=_HEADS,
    aliases={
        "hidden_size": ("n_embd",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("n_positions",),
    },
    limits={"reorder_and_upcast_attn": (False,), "add_cross_attention": (False,)},
    unused=(".attn.bias", ".attn.masked_bias"),
    activation="activation_function",
    is_rotary=False,
    refused=("`reorder_and_upcast_attn`", "cross attention"),
    has_window=False,
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "vocab_size": 50432,
        "num_attention_heads": 64,
        "num_key_value_heads": "num_attention_heads",
        "intermediate_size": 24576,
        "attention_bias": True,
    },
    block={
        "attention.query_key_value.weight": "3*hidden_size hidden_size",
        "attention.dense.weight": "hidden_size hidden_size",
        **biased(
            {
                "mlp.dense_h_to_4h.weight": "intermediate_size hidden_size",
                "mlp.dense_4h_to_h.weight": "hidden_size intermediate_size",
                "input_layernorm.weight": _LAYER_NORM,
                "post_attention_layernorm.weight": _LAYER_NORM,
            }
        ),
    },
    optional={
        "attention_bias": {
            "attention.query_key_value.bias": "3*hidden_size",
            "attention.dense.bias": "hidden_size",
        }
    },
    tables=Tables(
        blocks="gpt_neox.layers",
        embedding="gpt_neox.embed_in.weight",
        norm=("gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"),
        head="embed_out.weight",
    ),
    kv=_HEADS,
    unused=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    has_window=False,
)
_OPT_MLP: Shapes = {"fc1.weight": "ffn_dim hidden_size", "fc2.weight": "hidden_size ffn_dim"}
OPT = Family(
    "opt",
    "OPTForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "num_attention_heads": 12,
        "num_key_value_heads": "num_attention_heads",
        "ffn_dim": 3072,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": "hidden_size",
    },
    block={
        **{name.replace("o_proj", "out_proj"): shape for name, shape in ATTENTION.items()},
        **_OPT_MLP,
        **biased(
            {"self_attn_layer_norm.weight": _LAYER_NORM, "final_layer_norm.weight": _LAYER_NORM}
        ),
    },
    optional={
        "enable_bias": {
            **{name.replace("o_proj", "out_proj"): shape for name, shape in ALL_BIAS.items()},
            "fc1.bias": "ffn_dim",
            "fc2.bias": "hidden_size",
        }
    },
    tables=Tables(
        blocks="model.decoder.layers",
        embedding="model.decoder.embed_tokens.weight",
        positions="model.decoder.embed_positions.weight",
        position_rows="max_position_embeddings+2",
        norm=("model.decoder.final_layer_norm.weight", "model.decoder.final_layer_norm.bias"),
    ),
    tied=True,
    kv=_HEADS,
    limits={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    equal={"word_embed_proj_dim": "hidden_size"},
    activation="activation_function",
    is_rotary=False,
    refused=("norms after the sublayers, and embeddings of another width, as in OPT-350m",),
    has_window=False,
)
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "vocab_size": 250880,
        "num_attention_heads": 8,
        "num_key_value_heads": "num_attention_heads",
    },
    block=biased(
        {
            "self_attention.query_key_value.weight": "3*hidden_size hidden_size",
            "self_attention.dense.weight": "hidden_size hidden_size",
            "mlp.dense_h_to_4h.weight": "4*hidden_size hidden_size",
            "mlp.dense_4h_to_h.weight": "hidden_size 4*hidden_size",
            "input_layernorm.weight": _LAYER_NORM,
            "post_attention_layernorm.weight": _LAYER_NORM,
        }
    ),
    tables=Tables(
        blocks="transformer.h",
        embedding="transformer.word_embeddings.weight",
        embedding_norm=(
            "transformer.word_embeddings_layernorm.weight",
            "transformer.word_embeddings_layernorm.bias",
        ),
        norm=("transformer.ln_f.weight", "transformer.ln_f.bias"),
    ),
    tied=True,
    kv=_HEADS,
    aliases={
        "hidden_size": ("n_embed",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "max_position_embeddings": ("seq_length",),
    },
    activation="",
    is_rotary=False,
    has_score_tables=True,
    has_window=False,
)


def _falcon_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Falcon's two layouts of attention and norms come to."""
    heads = values.get("num_attention_heads") or 71
    is_new = bool(values.get("new_decoder_architecture"))
    kv_heads = values.get("num_kv_heads") or heads
    if not is_new:
        kv_heads = heads if values.get("multi_query") is False else 1
    norms = values.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    is_parallel = values.get("parallel_attn") is not False
    return {"num_key_value_heads": kv_heads, "has_two_norms": is_parallel and norms == 2}


FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "vocab_size": 65024,
        "num_attention_heads": 71,
        "ffn_hidden_size": "4*hidden_size",
        "parallel_attn": True,
    },
    block={
        "self_attention.query_key_value.weight": f"{QUERY_ROWS}+2*{KEY_ROWS} hidden_size",
        "self_attention.dense.weight": "hidden_size hidden_size",
        "mlp.dense_h_to_4h.weight": "ffn_hidden_size hidden_size",
        "mlp.dense_4h_to_h.weight": "hidden_size ffn_hidden_size",
    },
    optional={
        "bias": {
            "self_attention.query_key_value.bias": f"{QUERY_ROWS}+2*{KEY_ROWS}",
            "self_attention.dense.bias": "hidden_size",
            "mlp.dense_h_to_4h.bias": "ffn_hidden_size",
            "mlp.dense_4h_to_h.bias": "hidden_size",
        },
        "has_two_norms": biased({"ln_attn.weight": _LAYER_NORM, "ln_mlp.weight": _LAYER_NORM}),
        "!has_two_norms": biased({"input_layernorm.weight": _LAYER_NORM}),
        "!parallel_attn": biased({"post_attention_layernorm.weight": _LAYER_NORM}),
    },
    tables=Tables(
        blocks="transformer.h",
        embedding="transformer.word_embeddings.weight",
        norm=("transformer.ln_f.weight", "transformer.ln_f.bias"),
    ),
    tied=True,
    derive=_falcon_fields,
    limits={"alibi": (False,)},
    unused=("self_attention.rotary_emb.inv_freq",),
    activation="activation",
    is_ported=True,
    refused=("ALiBi, as in Falcon-RW",),
    has_window=False,
)
CLASSIC_FAMILIES = {family.name: family for family in (GPT2, GPT_NEOX, OPT, BLOOM, FALCON)}
"""`model_type` of config.json -> family."""
