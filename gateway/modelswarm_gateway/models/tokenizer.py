"""Tokenizer, chat template and sampling defaults of one model, from the bytes of its files.

Built by the model registry once a server has sent the files; used by the service. Chat templates run in the template
process. Uses no torch, no transformers, and no hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from modelswarm.checkpoint.chat_template import TEMPLATE_FILE, select_template
from modelswarm.checkpoint.tokenizer import entries_fault
from modelswarm.process.start_progress import StartPhase
from modelswarm_gateway.models.chat_prompts import ChatPrompts
from modelswarm_gateway.models.chat_template import TemplateError
from modelswarm_gateway.models.detokenizer import Detokenizer
from modelswarm_gateway.models.encode_pool import EncodePool
from modelswarm_gateway.models.sampling_defaults import SamplingDefaults, read_defaults
from modelswarm_gateway.models.template_process import TemplateProcess
from modelswarm_gateway.models.token_bytes import TokenBytes

REQUIRED_FILES = ("tokenizer.json",)
OPTIONAL_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
    "generation_config.json",
    "config.json",
)
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Characters; longer texts are tokenized in a thread.
LONG_TEXT = 8_000
# Most characters of a text: so many for each token of the context, and `MORE_CHARACTERS`. Usual are 3 to 5.
CHARACTERS_PER_TOKEN, MORE_CHARACTERS = 16, 64 << 10
# Most characters of a text for any context: a server may state one of any length, and a text needs 230 bytes for each.
MAX_TEXT_CHARACTERS = 2 << 20
# Characters for each token of the context; above, tokens are counted in pieces first.
USUAL_CHARACTERS_PER_TOKEN = 8
# Characters of a piece: it needs about 15 MiB.
PIECE_CHARACTERS = 64 << 10
# Tokens that a cut between two pieces may add.
TOKENS_PER_CUT = 128
# A chat before messages that are appended: the text behind its answer is the same as behind any other answer.
_ANSWER_BEFORE = "\ue0a5answer\ue0a5"
_CHAT_BEFORE = (
    {"role": "user", "content": "\ue0a5"},
    {"role": "assistant", "content": _ANSWER_BEFORE},
)
# Tokens of the context while no server has told.
UNKNOWN_LIMIT = 128 << 10


class ModelFilesError(Exception):
    """The model's files cannot be used; `str()` names the file."""


class TextTooLong(Exception):
    """The text has more characters or tokens than the context can hold; `str()` gives the numbers."""


class ModelTokenizer:
    """Templates, encodes and decodes for one model revision."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        templates: TemplateProcess,
        pool: EncodePool | None = None,
        enter_phase: Callable[[StartPhase], None] = lambda phase: None,
    ) -> None:
        """Read the files. Call it in a thread: `templates` compiles the template. Raise TemplateProcessError.

        `pool`: threads for long texts; by default of its own. `enter_phase` is called when the chat template is
        compiled, which may take long.
        """
        self._tokenizer = _tokenizer(files)
        settings, config = _json(files, "tokenizer_config.json"), _json(files, "config.json")
        special = _special_tokens(settings, _json(files, "special_tokens_map.json"))
        enter_phase(StartPhase.TEMPLATE)
        self._chat = ChatPrompts(_template(files, settings), special, templates)
        eos = self._tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        self.defaults: SamplingDefaults = read_defaults(
            _json(files, "generation_config.json"), config, eos
        )
        self.vocabulary = _vocabulary(config, self._tokenizer)
        self._pool = pool or EncodePool()
        self._token_bytes: TokenBytes | None = None

    @property
    def chat_fault(self) -> str:
        """Return the sentence that chats are refused with; "" if the model can chat."""
        return self._chat.fault

    async def encode(self, text: str, *, special: bool, limit: int = 0) -> list[int]:
        """Return the token ids of `text`; `special` adds the tokenizer's special tokens (its bos, usually).

        `limit`: positions of the context, 0 if unknown. Raise TextTooLong or TooManyTexts.
        """
        if len(text) <= LONG_TEXT:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        limit = limit or UNKNOWN_LIMIT
        if len(text) > MAX_TEXT_CHARACTERS:
            detail = f"{len(text)} characters are more than {MAX_TEXT_CHARACTERS}"
            raise _too_long(f"{detail}; a longer prompt may be given as token ids")
        if CHARACTERS_PER_TOKEN * limit + MORE_CHARACTERS < len(text):
            raise _too_long(f"{len(text)} characters are more than {limit} tokens can hold")
        return await self._pool.run(partial(self._encode_long, text, special, limit), len(text))

    def _encode_long(self, text: str, special: bool, limit: int) -> list[int]:
        if len(text) > USUAL_CHARACTERS_PER_TOKEN * limit:
            self._check_token_count(text, limit)
        return self._encode_outside_lock(text, special)

    def _encode_outside_lock(self, text: str, special: bool) -> list[int]:
        # encode() keeps the interpreter lock for seconds on a long text; encode_batch() does not.
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=special)
        return list(encoding.ids)

    def _check_token_count(self, text: str, limit: int) -> None:
        """Raise TextTooLong if the text has clearly more than `limit` tokens, without tokenizing it as a whole."""
        start = count = 0
        while start < len(text):
            end = start + PIECE_CHARACTERS
            blank = text.rfind(" ", start + 1, end) if end < len(text) else -1
            end = blank if blank > start else end
            count += len(self._encode_outside_lock(text[start:end], special=False)) - TOKENS_PER_CUT
            start = end
            if count > limit:
                raise _too_long(f"it has more than {limit} tokens")

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any] | None = None,
        limit: int = 0,
    ) -> list[int]:
        """Return the token ids of the rendered messages. Templates write bos themselves.

        Raise TemplateError, TemplateProcessError, TextTooLong or TooManyTexts.
        """
        text = await self._chat.render(messages, extra)
        return await self.encode(text, special=False, limit=limit)

    async def encode_next_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any] | None = None,
        limit: int = 0,
    ) -> list[int]:
        """Return the token ids that follow an assistant's answer in a chat that goes on with `messages`.

        They begin with the end of that answer. Raises as `encode_chat` does.
        """
        text = await self._chat.render([*_CHAT_BEFORE, *messages], extra)
        _, answer, following = text.partition(_ANSWER_BEFORE)
        if not answer:
            detail = "does not show an answer unchanged, so messages cannot be appended; send all messages"
            raise TemplateError(f"the model's chat template {detail}")
        return await self.encode(following, special=False, limit=limit)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; special tokens have those of their names."""
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(self._tokenizer)
        return self._token_bytes.bytes_of(token)

    def detokenizer(self, before: Sequence[int]) -> Detokenizer:
        return Detokenizer(self, before)


def _too_long(detail: str) -> TextTooLong:
    return TextTooLong(f"the prompt is too long for this model's context: {detail}")


def _tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    if "tokenizer.json" not in files:
        raise ModelFilesError("tokenizer.json: the model has no such file")
    if fault := entries_fault(files["tokenizer.json"]):
        raise ModelFilesError(f"tokenizer.json: {fault}")
    try:
        tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as error:  # the Rust library raises bare Exception
        raise ModelFilesError(f"tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the model has no such file."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        raise ModelFilesError(f"{name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{name}: must be a JSON object")
    return value


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token ... as text; each is a string or an object with `content`. The first source wins."""
    found: dict[str, str] = {}
    for source in sources:
        for name in SPECIAL_TOKENS:
            value = source.get(name)
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                found.setdefault(name, token)
    return found


def _template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the model's template and the name of its file; None without one."""
    jinja = files[TEMPLATE_FILE].decode(errors="replace") if TEMPLATE_FILE in files else None
    return select_template(jinja, settings)


def _vocabulary(config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Return the vocabulary size: token ids below it are valid. Some models nest their text settings."""
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        size = source.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    return int(tokenizer.get_vocab_size(with_added_tokens=True))
