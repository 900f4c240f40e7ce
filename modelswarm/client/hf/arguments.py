"""Arguments of transformers' generate that a swarm does not obey: refused by name, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from modelswarm.client.hf.errors import UnsupportedArgumentError

_MOVED = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "num_beam_groups": "group beam search",
    "diversity_penalty": "group beam search",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}
"""Arguments of modes that transformers 5 moved to repositories of the hub."""
_LOGITS = {
    "num_beams": "beam search",
    "assistant_model": "assisted generation",
    "assistant_tokenizer": "assisted generation",
    "assistant_early_exit": "assisted generation",
    "prompt_lookup_num_tokens": "prompt lookup",
    "use_mtp": "assisted generation",
    "logits_processor": "a processor of the caller",
    "prefix_allowed_tokens_fn": "a function of the caller",
    "negative_prompt_ids": "classifier-free guidance",
    "negative_prompt_attention_mask": "classifier-free guidance",
    "output_scores": "the result",
    "output_logits": "the result",
    "custom_generate": "a loop of the caller",
}
"""Arguments whose effect needs logits -> what needs them."""
_SERVERS = "servers compute all of it"
_NO_EFFECT = {
    "cache_implementation": "servers keep the KV in pages",
    "cache_config": "servers keep the KV in pages",
    "max_cache_len": "servers keep the KV in pages",
    "past_key_values": "servers keep the KV; use model.inference_session",
    "low_memory": "servers keep the KV in pages",
    "prefill_chunk_size": "servers choose their chunks",
    "compile_config": _SERVERS,
    "disable_compile": _SERVERS,
    "synced_gpus": _SERVERS,
    "continuous_batching_config": "servers batch continuously by themselves",
    "position_ids": "positions follow from attention_mask",
    "token_type_ids": "the served families have none",
    "inputs_embeds": "embeddings are on the servers; pass input_ids",
    "output_attentions": "attentions do not come to the client",
    "output_hidden_states": "hidden states do not come to the client",
    "is_assistant": "the model assists no other one",
}
_SESSION = {
    "num_return_sequences": "a session goes on with one answer per row; repeat the rows of the input",
    "token_healing": "it changes the log of the session",
}


def check_arguments(
    given: Mapping[str, Any], defaults: Mapping[str, Any], *, in_session: bool
) -> None:
    """Raise UnsupportedArgumentError for the first argument without an effect.

    `given`: arguments and fields that the caller set. `defaults`: the model's own configuration of `generate`.
    """
    for name in (*_MOVED, *_LOGITS, *_NO_EFFECT, *_SESSION):
        value = given.get(name)
        if not _is_set(name, value) or (name in defaults and value == defaults[name]):
            continue
        if name in _MOVED:
            detail = f"transformers 5 moved {_MOVED[name]} to a repository of the hub; leave it out"
            raise UnsupportedArgumentError(name, detail)
        if name in _LOGITS:
            refuse_logits({name: f"{_LOGITS[name]} needs them"})
        if name in _NO_EFFECT:
            raise UnsupportedArgumentError(name, f"{_NO_EFFECT[name]}; leave it out")
        if in_session and name in _SESSION:
            raise UnsupportedArgumentError(name, f"{_SESSION[name]}; leave it out in a session")
    if given.get("use_cache") is False:
        detail = "servers keep the KV, and the tokens are the same; leave it out"
        raise UnsupportedArgumentError("use_cache", detail)


def refuse_logits(reasons: Mapping[str, str]) -> None:
    """Raise UnsupportedArgumentError for the first argument that needs logits at the client."""
    for name, reason in reasons.items():
        _refuse(name, reason)


def _refuse(name: str, reason: str) -> NoReturn:
    detail = "logits at the client are not built; leave it out"
    raise UnsupportedArgumentError(name, f"{reason}, and {detail}")


def _is_set(name: str, value: Any) -> bool:
    """Return whether a value asks for something that transformers does not do by itself."""
    if name in ("num_beams", "num_beam_groups", "num_return_sequences"):
        return value is not None and value != 1
    if isinstance(value, (list, tuple)):
        return bool(len(value))
    return value is not None and value is not False
