"""Small tokenizers and model files, made in memory for tests of the gateway's text."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from modelswarm_gateway.models.tokenizer import ModelTokenizer

SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
BEGIN, END = 1, 2
BYTES_FROM = len(SPECIALS)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ m.reasoning_content or '' }}{{ m.name or '' }}"
    "{{ m.tool_calls or '' }}{{ m.tool_call_id or '' }}<|end|>{% endfor %}"
    "{{ reasoning_effort or '' }}{{ tone or '' }}{{ documents or '' }}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> Tokenizer:
    """Return a tokenizer with one token per byte, as in GPT-2, after five special tokens."""
    signs = pre_tokenizers.ByteLevel.alphabet()
    keep = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in keep]
    table = {byte: chr(byte) for byte in keep}
    table |= {byte: chr(256 + place) for place, byte in enumerate(moved)}
    assert set(table.values()) == set(signs)
    vocabulary = {token: place for place, token in enumerate(SPECIALS)}
    vocabulary |= {sign: BYTES_FROM + byte for byte, sign in table.items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Return words with a leading ▁ and a token for each byte, as in Llama 2. Unknown text falls back to bytes."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "▁the", "!", "lo", "▁Hel"]
    vocabulary = {word: place for place, word in enumerate(words)}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def encode_bytes(text: str) -> list[int]:
    """Return the ids of the byte-level tokenizer."""
    return [BYTES_FROM + byte for byte in text.encode()]


def model_files(**changes: Any) -> dict[str, bytes]:
    """Return files of a byte-level model. `changes`: generation, config, settings (dicts) or template (None: none)."""
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    template = changes.get("template", CHAT_TEMPLATE)
    if template is not None:
        settings["chat_template"] = template
    config = {"model_type": "llama", "vocab_size": BYTES_FROM + 256, "eos_token_id": END}
    documents = {
        "tokenizer_config.json": settings | changes.get("settings", {}),
        "config.json": config | changes.get("config", {}),
        "generation_config.json": changes.get("generation", {"eos_token_id": END}),
    }
    files = {name: json.dumps(content).encode() for name, content in documents.items()}
    return files | {"tokenizer.json": byte_level().to_str().encode()}


def make_tokenizer(files: dict[str, bytes] | None = None, **changes: Any) -> ModelTokenizer:
    """Return the gateway's tokenizer of `files`, by default of a byte-level model. `changes`: see `model_files`.

    Its processes end when it is no longer used.
    """
    return ModelTokenizer(model_files(**changes) if files is None else files, name="toy")
