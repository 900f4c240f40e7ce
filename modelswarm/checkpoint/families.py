"""The supported model families, and the defaults that their config.json may leave out.

One table for all users: placement and facts read it without torch, the server's span loader adds nothing to it. Knows
no files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    context: int  # default of `max_position_embeddings` (transformers')
    vocab: int  # default of `vocab_size`
    tied: bool  # default of `tie_word_embeddings`
    nested: bool = False  # config.json holds the text model under `text_config`


FAMILIES = {
    "llama": Family("llama", 2048, 32000, tied=False),
    "qwen2": Family("qwen2", 32768, 151936, tied=False),
    "qwen3": Family("qwen3", 32768, 151936, tied=False),
    "mistral": Family("mistral", 131072, 32000, tied=False),
    "gemma2": Family("gemma2", 8192, 256000, tied=True),
    "gemma3_text": Family("gemma3", 131072, 262208, tied=True),
    "gemma3": Family("gemma3", 131072, 262208, tied=True, nested=True),
}
"""`model_type` of config.json -> family."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope types whose frequencies depend on the configuration alone. `dynamic` and `longrope` depend on the longest
position of the batch, so one session would change the others (transformers' `dynamic_rope_update`)."""
