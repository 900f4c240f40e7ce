"""Arguments of transformers' generate that a swarm does not obey: refused by name, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
LOGITS = ("logits_processor", "output_scores", "output_logits")
"""Arguments of plain generation whose effect needs logits at the client, beside processors that servers lack."""
_SERVERS = "servers compute all of it"
_KEPT = "servers keep the KV; use model.inference_session"
_ASSISTANT = "transformers reads it of assistant_model.generation_config; set it there"
_NO_EFFECT = {
    "cache_implementation": "servers keep the KV in pages",
    "cache_config": "servers keep the KV in pages",
    "max_cache_len": "servers keep the KV in pages",
    "past_key_values": _KEPT,
    "cache": _KEPT,
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
    "output_hidden_states": "only model(ids, output_hidden_states=True) gives them",
    "is_assistant": "the model assists no other one",
    "assistant_early_exit": "blocks are on the servers",
    "use_mtp": "blocks are on the servers",
    "speculation_type": "its drafts need hidden states of the servers; use assistant_model",
    "decoder_start_token_id": "the served families begin with input_ids, or with bos_token_id",
    "num_assistant_tokens": _ASSISTANT,
    "num_assistant_tokens_schedule": _ASSISTANT,
    "assistant_confidence_threshold": _ASSISTANT,
    "assistant_lookbehind": _ASSISTANT,
    "target_lookbehind": _ASSISTANT,
    "labels": "only model(ids, labels=labels) gives a loss",
    "logits_to_keep": "only model(ids, logits_to_keep=count) gives logits",
    "return_dict": "results are never tuples",
}
_OBEYED = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time"),
        *("early_stopping", "stop_strings", "do_sample", "num_beams", "length_penalty"),
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "renormalize_logits", "remove_invalid_values"),
        *("repetition_penalty", "encoder_repetition_penalty", "exponential_decay_length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("sequence_bias", "suppress_tokens", "begin_suppress_tokens", "token_healing"),
        *("forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "watermarking_config"),
        *("num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "use_cache"),
        *("assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    }
)
"""Fields of transformers' GenerationConfig that servers obey, or transformers' own code at the client."""
_NEEDS = {
    "negative_prompt_ids": "guidance_scale",
    "negative_prompt_attention_mask": "negative_prompt_ids",
    "assistant_ensemble_weight": "assistant_model",
    "max_matching_ngram_size": "prompt_lookup_num_tokens",
}
"""Arguments that have an effect only with another one."""
_NOTES = frozenset({"transformers_version", "_from_model_config"})
"""Fields that say where a configuration is from."""
_SESSION = {
    "num_return_sequences": "a session goes on with one answer per row; repeat the rows of the input",
    "token_healing": "it changes the log of the session",
    "num_beams": "beams are several contexts",
    "custom_generate": "a loop of the caller has its own contexts",
}


def unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the fields of a GenerationConfig that are neither obeyed nor refused: those of a later transformers."""
    return sorted({*config} - _OBEYED - _NOTES - _MOVED.keys() - _NO_EFFECT.keys())


def check_arguments(
    given: Mapping[str, Any], defaults: Mapping[str, Any], *, in_session: bool
) -> None:
    """Raise UnsupportedArgumentError for the first argument without an effect.

    `given`: arguments and fields that the caller set. `defaults`: the model's own configuration of `generate`.
    """
    for name in (*_MOVED, *_NO_EFFECT):
        value = given.get(name)
        if not _is_set(name, value) or (name in defaults and value == defaults[name]):
            continue
        if name in _MOVED:
            detail = f"transformers 5 moved {_MOVED[name]} to a repository of the hub; leave it out"
            raise UnsupportedArgumentError(name, detail)
        if name in _NO_EFFECT:
            raise UnsupportedArgumentError(name, f"{_NO_EFFECT[name]}; leave it out")
    if in_session:
        _check_in_session(given, defaults)
    _check_needs(given, defaults)
    for name in unknown_fields(defaults):
        if _is_set(name, given.get(name)) and given[name] != defaults[name]:
            detail = "this version does not know what it does on a swarm"
            raise UnsupportedArgumentError(name, f"{detail}; leave it out")
    if given.get("use_cache") is False and defaults.get("use_cache") is not False:
        detail = "servers keep the KV, and the tokens are the same; leave it out"
        raise UnsupportedArgumentError("use_cache", detail)
    if isinstance(given.get("custom_generate"), str):
        detail = "code of a repository is not run; pass a function"
        raise UnsupportedArgumentError("custom_generate", detail)


def _check_in_session(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise UnsupportedArgumentError for a mode that no session has, also if it is the model's default."""
    for name, reason in _SESSION.items():
        is_default = given.get(name) is None
        value = defaults.get(name) if is_default else given[name]
        if _is_set(name, value):
            cure = "leave it out in a session"
            if is_default:
                plain = False if isinstance(value, bool) else 1
                cure = f"{value!r} is the model's default, so pass {name}={plain} in a session"
            raise UnsupportedArgumentError(name, f"{reason}; {cure}")


def _check_needs(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for name, other in _NEEDS.items():
        value = given.get(name)
        if value is None or (name in defaults and value == defaults[name]):
            continue
        found = defaults.get(other) if given.get(other) is None else given[other]
        if found is None or (other == "guidance_scale" and found == 1):
            detail = f"it has an effect only with {other}; give both, or leave it out"
            raise UnsupportedArgumentError(name, detail)


def needs_logits(given: Mapping[str, Any]) -> bool:
    """Return whether plain generation with these arguments needs logits at the client."""
    return any(_is_set(name, given.get(name)) for name in LOGITS)


def returns_scores(config: Any) -> bool:
    """Return whether a result has scores or logits, by the caller's arguments or by the model's own configuration."""
    return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))


def check_tuned_forward(given: Mapping[str, Any]) -> None:
    """Raise UnsupportedArgumentError for an argument that a forward pass with gradients does not have."""
    for name, value in given.items():
        if value:
            detail = (
                "a forward pass with labels or soft prompts runs the whole input and keeps nothing"
            )
            raise UnsupportedArgumentError(name, f"{detail}; leave it out")


def _is_set(name: str, value: Any) -> bool:
    """Return whether a value asks for something that transformers does not do by itself."""
    if name in ("num_beams", "num_beam_groups", "num_return_sequences"):
        return value is not None and value != 1
    if isinstance(value, (list, tuple)):
        return bool(len(value))
    return value is not None and value is not False


def check_forward(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedArgumentError for an argument of `forward` without an effect."""
    for name, value in options.items():
        plain = name == "return_dict"  # the only option whose True changes nothing
        if value is None or value is plain:
            continue
        detail = _NO_EFFECT.get(name, "logits of input_ids are all that servers send")
        raise UnsupportedArgumentError(name, f"{detail}; leave it out")
