"""Tokenizer, chat template and sampling defaults of one model, from the bytes of its files.

Built by the model registry once a server has sent the files; used by the service. The model's processes
tokenize texts and render chat templates; tokens are decoded here, from a table. Uses no torch, no transformers and
no hub.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from modelswarm.checkpoint.chat_template import (
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    select_template,
    tool_template,
)
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.checkpoint.generation_config import nested_settings
from modelswarm.checkpoint.tokenizer import entries_fault
from modelswarm.process.start_progress import StartPhase
from modelswarm_gateway.errors import ApiError, Code, invalid_request
from modelswarm_gateway.models.chat_prompts import ChatPrompts, large_seconds
from modelswarm_gateway.models.chat_template import TemplateError
from modelswarm_gateway.models.circuit_breaker import CircuitBreaker
from modelswarm_gateway.models.detokenizer import Detokenizer
from modelswarm_gateway.models.encode_pool import TooManyTexts
from modelswarm_gateway.models.model_process import (
    CPU_SECONDS,
    SMALL,
    BudgetError,
    ModelProcess,
    ModelProcessError,
    Request,
    pack_request,
)
from modelswarm_gateway.models.model_requests import SMALL_REQUEST_BYTES, ModelRequests
from modelswarm_gateway.models.model_worker import too_many_characters
from modelswarm_gateway.models.sampling_defaults import (
    MAX_END_TOKENS,
    SamplingDefaults,
    read_defaults,
)
from modelswarm_gateway.models.token_table import TokenTable

REQUIRED_FILES = ("tokenizer.json",)
OPTIONAL_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
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
# A chat before messages that are appended: the text behind its answer is the same as behind any other answer.
_ANSWER_BEFORE = "\ue0a5answer\ue0a5"
_CHAT_BEFORE = (
    {"role": "user", "content": "\ue0a5"},
    {"role": "assistant", "content": _ANSWER_BEFORE},
)
# Tokens of the context while no server has told.
UNKNOWN_LIMIT = 128 << 10


def longest_text(context: int) -> int:
    """Return the most tokens of a text that is only counted: clients ask by how much it is beyond the context."""
    return max(context, UNKNOWN_LIMIT)


class ModelFilesError(Exception):
    """The model's files cannot be used; `str()` names the file."""


class TextTooLong(Exception):
    """The text has more characters or tokens than the context can hold; `str()` gives the numbers."""


class EncodeError(Exception):
    """The tokenizer cannot encode the text, or not within its time and memory; `str()` gives the reason."""


@contextmanager
def as_api_errors(field: str) -> Iterator[None]:
    """Raise ApiError in place of what encoding raises, for the request's field. TextTooLong is left to the caller."""
    try:
        yield
    except TooManyTexts as error:
        raise ApiError(Code.NO_CAPACITY, str(error), param=field, retry_after=1.0) from error
    except (TemplateError, EncodeError) as error:
        raise invalid_request(field, f"{field}: {error}") from error
    except ModelProcessError as error:
        seconds = math.ceil(error.retry_after)
        detail = f"{error}; retry in {seconds} s"
        raise ApiError(Code.NO_SERVERS, detail, retry_after=float(seconds)) from error


class ModelTokenizer:
    """Templates, encodes and decodes for one model revision."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        places: asyncio.Semaphore | None = None,
        enter_phase: Callable[[StartPhase], None] = lambda phase: None,
        cpu_seconds: float = CPU_SECONDS,
        *,
        name: str,
    ) -> None:
        """Start the model's processes with the files. Call it in a thread. Raise ModelFilesError, ModelProcessError.

        `places`: for the large requests of all models. `enter_phase` is called when the chat template is compiled,
        which may take long. `cpu_seconds`: processor time of a small request. `name`: the model's, for the log.
        """
        # Token ids of two tokenizers with one digest stand for the same texts.
        self.digest = hashlib.sha256(files.get("tokenizer.json", b"")).hexdigest()[:16]
        settings, config = _json(files, "tokenizer_config.json"), _json(files, "config.json")
        generation = _json(files, "generation_config.json")
        special = _special_tokens(*_special_sources(files, settings))
        self._process = _start_process(files, special.get("eos_token"), name)
        self._requests = ModelRequests(self._process, places)
        self._cpu_seconds = cpu_seconds
        self._breakers = {is_large: CircuitBreaker() for is_large in (False, True)}
        try:
            enter_phase(StartPhase.TEMPLATE)
            template = _template(files, settings)
            for_tools = _tool_template(files, settings)
            self._chat = ChatPrompts(template, special, self._requests, cpu_seconds, for_tools)
            answer = self._process.answer
            self._table = TokenTable(self._process.table, answer["decoder"])
            self.defaults: SamplingDefaults = read_defaults(generation, config, answer["eos"])
            if (count := len(self.defaults.eos)) > MAX_END_TOKENS:
                detail = f"{count} end tokens; allowed: at most {MAX_END_TOKENS}"
                raise ModelFilesError(f"eos_token_id: {detail}")
            self.vocabulary = _vocabulary(config, answer["size"])
        except BaseException:
            self.close()
            raise

    @property
    def chat_fault(self) -> str:
        """Return the sentence that chats are refused with; "" if the model can chat."""
        return self._chat.fault

    @property
    def memory_bytes(self) -> int:
        """Memory that the tokenizer needs as long as it is loaded, without large requests."""
        resident: int = self._process.answer["resident"]
        return resident + (SMALL.mebibytes << 20) + self._table.memory_bytes

    @property
    def is_running(self) -> bool:
        """Return whether the processes run. If not, texts cannot be tokenized, but tokens can be decoded."""
        return self._process.is_running

    def close(self) -> None:
        """End the processes. Tokens can still be decoded."""
        self._requests.close()

    async def encode(self, text: str, *, special: bool, limit: int = 0) -> list[int]:
        """Return the token ids of `text`; `special` adds the tokenizer's special tokens (its bos, usually).

        `limit`: positions of the context, 0 if unknown. Raise TextTooLong, TooManyTexts, EncodeError or
        ModelProcessError.
        """
        limit = limit or UNKNOWN_LIMIT
        if reason := too_many_characters(len(text), limit):
            raise _too_long(reason)
        is_large = len(text) > SMALL_REQUEST_BYTES
        seconds = large_seconds(len(text)) if is_large else self._cpu_seconds
        fields = {"text": text, "special": special, "limit": limit}
        return await self._ask(pack_request(fields, encode_seconds=seconds), is_large)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any] | None = None,
        limit: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        continues: bool = False,
        appends: bool = False,
    ) -> list[int]:
        """Return the token ids of the rendered messages. Templates write bos themselves.

        `continues`: up to the end of the last message's text. `appends`: only those that follow an assistant's answer
        in a chat that goes on with `messages`; they begin with the end of that answer. Raise TemplateError, and as
        `encode` does.
        """
        request, is_large = self._chat.request(
            [*_CHAT_BEFORE, *messages] if appends else messages,
            extra,
            limit or UNKNOWN_LIMIT,
            after=_ANSWER_BEFORE if appends else "",
            tools=tools,
            continues=continues,
        )
        return await self._ask(request, is_large, has_tools=bool(tools))

    async def _ask(self, request: Request, is_large: bool, *, has_tools: bool = False) -> list[int]:
        breaker = self._breakers[is_large]
        if (seconds := breaker.seconds_open) > 0:
            raise ModelProcessError(f"the model's tokenizer {breaker.reason}", seconds)
        try:
            head, data = await self._requests.ask(request, is_large=is_large)
        except BudgetError as error:
            if not error.is_rendered:
                raise self._chat.failure(error, is_large, has_tools=has_tools) from error
            breaker.record_failure(str(error))
            raise EncodeError(f"the model's tokenizer {error}") from error
        if "refused" in head:
            raise TemplateError(head["refused"])
        breaker.record_success()
        if "too_long" in head:
            raise _too_long(head["too_long"])
        if "unencodable" in head:
            raise EncodeError(f"the model's tokenizer refuses this text: {head['unencodable']}")
        ids = array("I")
        ids.frombytes(data)
        if (largest := max(ids, default=0)) >= self.vocabulary:
            [name] = self._table.names([largest])
            detail = f"the model has no embedding for its token {name[:100]}"
            raise EncodeError(f"{detail}: {largest}, allowed up to {self.vocabulary - 1}")
        return ids.tolist()

    def chat_template(self, *, has_tools: bool) -> str:
        """Return the text of the model's chat template, of requests with tools or without; "" without one."""
        return self._chat.template(has_tools=has_tools)

    def decode(self, ids: Sequence[int], markers: Sequence[str] = ()) -> str:
        """Return the text. Special tokens have none, unless they are among `markers`."""
        return self._table.decode(ids, markers)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens, with that of special tokens."""
        return self._table.decode_all(ids)

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entries of the ids; "" for an id without a token."""
        return self._table.names(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; special tokens have those of their names."""
        return self._table.bytes_of(token)

    def tokens_within(self, text: str) -> dict[str, int]:
        """Return the tokens within the text that a grammar must name, with their ids.

        Those without an embedding are none: their names stay unknown to the check of the grammar.
        """
        found = self._table.tokens_within(text)
        return {name: token for name, token in found.items() if token < self.vocabulary}

    def detokenizer(
        self, before: Sequence[int], markers: Sequence[str] = (), *, all_special: bool = False
    ) -> Detokenizer:
        """Return the detokenizer of one turn. `markers`: special tokens that have a text. `all_special`: all have."""
        return Detokenizer(_MarkerDecoder(self, markers, all_special), before)


class _MarkerDecoder:
    """Decodes with some special tokens as text, or with all of them."""

    def __init__(
        self, tokenizer: ModelTokenizer, markers: Sequence[str], all_special: bool
    ) -> None:
        self._tokenizer, self._markers, self._all_special = tokenizer, markers, all_special

    def decode(self, ids: Sequence[int]) -> str:
        if self._all_special:
            return self._tokenizer.decode_all(ids)
        return self._tokenizer.decode(ids, self._markers)


def _too_long(detail: str) -> TextTooLong:
    return TextTooLong(f"the prompt is too long for this model's context: {detail}")


def _start_process(files: Mapping[str, bytes], eos: str | None, name: str) -> ModelProcess:
    if "tokenizer.json" not in files:
        raise ModelFilesError("tokenizer.json: the model has no such file")
    if fault := entries_fault(files["tokenizer.json"]):
        raise ModelFilesError(f"tokenizer.json: {fault}")
    try:
        return ModelProcess(files["tokenizer.json"], eos, name)
    except ValueError as error:
        raise ModelFilesError(f"tokenizer.json: {error}") from error
    except BudgetError as error:
        raise ModelFilesError(f"tokenizer.json: the tokenizer {error}") from error


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


def _special_sources(
    files: Mapping[str, bytes], settings: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """Return what names the special tokens, as transformers has it: the older file wins until settings have ids."""
    older = _json(files, "special_tokens_map.json")
    return (settings,) if "added_tokens_decoder" in settings else (older, settings)


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


def _tool_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    """Return the template of requests with tools; "" if one template serves all."""
    if TOOL_TEMPLATE_FILE in files:
        return files[TOOL_TEMPLATE_FILE].decode(errors="replace")
    return "" if TEMPLATE_FILE in files else tool_template(settings)


def _vocabulary(config: Mapping[str, Any], tokens: int) -> int:
    """Return the vocabulary size: token ids below it are valid. Some models nest their text settings.

    Without a size there, as in Gemma 3 of 4B, the family's own counts, else that of the tokenizer, `tokens`.
    """
    for source in (config, nested_settings(config)):
        size = source.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    family = FAMILIES.get(str(config.get("model_type")))
    default = None if family is None else family.defaults.get("vocab_size")
    return default if isinstance(default, int) else tokens
