"""The model families that are served, and the defaults their config.json may leave out.

One table for everybody: placement and facts read it without torch, the server's span loader adds nothing to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    context: int  # `max_position_embeddings` when config.json does not say (transformers' default)
    vocab: int  # `vocab_size` when config.json does not say
    tied: bool  # `tie_word_embeddings` when config.json does not say
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
"""By the `model_type` of config.json."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope whose frequencies depend on the configuration alone. `dynamic` and `longrope` depend on the longest position
of the batch, so one session would change the others (transformers' `dynamic_rope_update`)."""
