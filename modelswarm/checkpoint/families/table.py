"""The table of all supported families, and the values of config.json that all of them share.

One table for all users: placement and facts read it without torch, the server's span loader adds nothing to it. The
defaults are those of transformers, and a test compares them. Knows no files.
"""

from __future__ import annotations

from modelswarm.checkpoint.families.classic import CLASSIC_FAMILIES
from modelswarm.checkpoint.families.family import Family
from modelswarm.checkpoint.families.fused import FUSED_FAMILIES
from modelswarm.checkpoint.families.generic import GENERIC_FAMILIES
from modelswarm.checkpoint.families.special import SPECIAL_FAMILIES

FAMILIES: dict[str, Family] = {
    **FUSED_FAMILIES,
    **GENERIC_FAMILIES,
    **CLASSIC_FAMILIES,
    **SPECIAL_FAMILIES,
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
