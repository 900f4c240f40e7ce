"""Fields of a model's generation_config.json that change no answer here, although they would in transformers.

The gateway names them in its log, `modelswarm plan` in its warnings. Reads neither weights nor tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from modelswarm.checkpoint.json_files import read_json
from modelswarm.protocol.sampling import MAX_BAD_WORD_TOKENS

GENERATION_FILE, CONFIG_FILE = "generation_config.json", "config.json"
MAX_MODEL_BAD_WORDS = 512
MAX_TOKEN_ID = (1 << 31) - 1
# Fields that would change an answer and are not obeyed -> values that are off.
_NOT_OBEYED: dict[str, tuple[object, ...]] = {
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "min_length": (0,),
    "exponential_decay_length_penalty": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "remove_invalid_values": (False,),
    "watermarking_config": (),
    "stop_strings": ([],),
    "max_time": (),
    "token_healing": (False,),
}


def ignored_fields(generation: Mapping[str, Any], bad_words: int) -> tuple[str, ...]:
    """Return the fields that are not obeyed. `bad_words`: number of the model's bad words."""
    found = [
        name
        for name, off in _NOT_OBEYED.items()
        if generation.get(name) is not None and generation[name] not in off
    ]
    if bad_words > MAX_MODEL_BAD_WORDS:
        found += ["bad_words_ids", "suppress_tokens"]
    return tuple(found)


def ignored_sentence(fields: Sequence[str]) -> str:
    """Return the warning about these fields."""
    some = ", ".join(fields)
    return f"{GENERATION_FILE}: {some} would change answers in transformers, and change none here"


def generation_warnings(folder: Path) -> tuple[str, ...]:
    """Return the warning about fields of the file in a model's folder; none without such fields. ModelSourceError."""
    if not (folder / GENERATION_FILE).is_file():
        return ()
    generation, config = _read_files(folder)
    words = model_bad_words(generation, set(end_tokens(generation, config)))
    fields = ignored_fields(generation, len(words))
    return (ignored_sentence(fields),) if fields else ()


def model_end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end tokens of the files in a model's folder. Raise ModelSourceError."""
    return end_tokens(*_read_files(folder))


def _read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON of both files; empty for a file that is missing."""
    files = folder / GENERATION_FILE, folder / CONFIG_FILE
    generation, config = (read_json(file) if file.is_file() else {} for file in files)
    return generation, config


def end_tokens(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens of the files; config.json counts only where generation_config.json has none.

    Some models nest the settings of their text.
    """
    sources = (generation, config, nested_settings(config))
    found = (token_ids(source.get("eos_token_id")) for source in sources)
    return next(filter(None, found), ())


def nested_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text in a config.json that has other parts; empty if it is of text only."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def model_bad_words(generation: Mapping[str, Any], eos: Set[int]) -> tuple[tuple[int, ...], ...]:
    """Return bad_words_ids without single end tokens, as transformers does, and suppress_tokens, as single ones."""
    found = generation.get("bad_words_ids")
    words = (
        [token_ids(word) for word in found if isinstance(word, list)]
        if isinstance(found, list)
        else []
    )
    words = [word for word in words if len(word) != 1 or word[0] not in eos]
    words += [(token,) for token in token_ids(generation.get("suppress_tokens"))]
    return tuple(word for word in dict.fromkeys(words) if 1 <= len(word) <= MAX_BAD_WORD_TOKENS)


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the valid token ids of a field. Some files use -1 for "none"."""
    entries = value if isinstance(value, list) else [value]
    return tuple(
        entry
        for entry in entries
        if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= MAX_TOKEN_ID
    )
