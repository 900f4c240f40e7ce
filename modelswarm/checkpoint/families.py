"""The supported model families: their classes, and the defaults that their config.json may leave out.

One table for all users: placement and facts read it without torch, the server's span loader adds nothing to it. The
defaults are those of transformers, and a test compares them. Knows no files.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class Bias(enum.Enum):
    """The projections of the attention that have a bias."""

    NEVER = "never"
    CONFIGURED = "configured"  # all four, by `attention_bias`
    QKV = "qkv"  # the three inputs, always


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    architecture: str  # the class in `architectures`
    context: int  # default of `max_position_embeddings`
    vocab: int  # default of `vocab_size`
    heads: int  # default of `num_attention_heads`
    kv_heads: int | None  # default of `num_key_value_heads`; None: as many as heads
    head_dim: int | None  # default of `head_dim`; None: `hidden_size` / heads
    intermediate: int  # default of `intermediate_size`
    tied: bool  # default of `tie_word_embeddings`
    bias: Bias = Bias.NEVER
    has_mlp_bias: bool = False  # `mlp_bias` has an effect
    has_head_norms: bool = False  # norms of queries and keys
    has_outer_norms: bool = False  # norms before and after the MLP
    activation: str = "hidden_act"  # name of the field
    heads_divide_hidden: bool = False  # transformers asks it even if `head_dim` is given
    nested: bool = False  # config.json holds the text model under `text_config`


_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    context=2048,
    vocab=32000,
    heads=32,
    kv_heads=None,
    head_dim=None,
    intermediate=11008,
    tied=False,
    bias=Bias.CONFIGURED,
    has_mlp_bias=True,
    heads_divide_hidden=True,
)
_QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    context=32768,
    vocab=151936,
    heads=32,
    kv_heads=32,
    head_dim=None,
    intermediate=22016,
    tied=False,
    bias=Bias.QKV,
)
_QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    context=32768,
    vocab=151936,
    heads=32,
    kv_heads=32,
    head_dim=128,
    intermediate=22016,
    tied=False,
    bias=Bias.CONFIGURED,
    has_head_norms=True,
)
_MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    context=131072,
    vocab=32000,
    heads=32,
    kv_heads=8,
    head_dim=None,
    intermediate=14336,
    tied=False,
)
_GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    context=8192,
    vocab=256000,
    heads=8,
    kv_heads=4,
    head_dim=256,
    intermediate=9216,
    tied=True,
    bias=Bias.CONFIGURED,
    has_outer_norms=True,
    activation="hidden_activation",
)
_GEMMA3 = Family(
    "gemma3",
    "Gemma3ForCausalLM",
    context=131072,
    vocab=262208,
    heads=8,
    kv_heads=4,
    head_dim=256,
    intermediate=9216,
    tied=True,
    bias=Bias.CONFIGURED,
    has_head_norms=True,
    has_outer_norms=True,
    activation="hidden_activation",
)
FAMILIES = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "mistral": _MISTRAL,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": replace(_GEMMA3, architecture="Gemma3ForConditionalGeneration", nested=True),
}
"""`model_type` of config.json -> family."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope types whose frequencies depend on the configuration alone. `dynamic` and `longrope` depend on the longest
position of the batch, so one session would change the others (transformers' `dynamic_rope_update`)."""
ACTIVATIONS = frozenset(
    {
        *("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2"),
        *("sigmoid", "silu", "swish", "tanh", "mish"),
    }
)
"""Names of activations without weights of their own, as transformers knows them."""
