"""The demo model's tokens: five special ones, then one per byte.

Called by the packer and the exam (`encode`, without a tokenizer library) and by the trainer, which
writes the shipped tokenizer files. Does not know the lessons.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

PAD, BEGIN, END, USER, ASSISTANT = range(5)
SPECIALS: Final = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
FIRST_BYTE: Final = len(SPECIALS)
VOCABULARY: Final = FIRST_BYTE + 256
CONTEXT: Final = 4096

# System messages are dropped on purpose: the model was not trained on them.
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def encode(text: str) -> list[int]:
    """Return the ids of plain text, as the shipped tokenizer gives them."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def printable_bytes() -> list[str]:
    """Return the character that the byte-level pre-tokenizer writes for each byte (GPT-2's table)."""
    keep = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in keep]
    table = {byte: chr(byte) for byte in keep}
    table |= {byte: chr(256 + place) for place, byte in enumerate(moved)}
    return [table[byte] for byte in range(256)]


def bare_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer without merges: decoding returns any UTF-8 text unchanged."""
    vocabulary = {token: place for place, token in enumerate(SPECIALS)}
    vocabulary |= {sign: FIRST_BYTE + byte for byte, sign in enumerate(printable_bytes())}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; the latter contains the chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BEGIN],
        "eos_token": SPECIALS[END],
        "pad_token": SPECIALS[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    }
    bare_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
