"""Chat template: renders chat messages to prompt text by the model's own Jinja template, in a sandbox.

Used in the processes of a model (`model_worker.py`), which bound its time and memory. The helpers are those that
Hugging Face templates expect. A template can neither change its input nor reach Python's internals. Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions

from modelswarm.checkpoint.chat_template import chat_environment, compile_template
from modelswarm.errors import ModelSourceError

# Errors that a template can raise on messages that its author did not expect.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateError(Exception):
    """The template does not compile, breaks the sandbox, or refuses these messages; `str()` gives the reason."""


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **other: Any) -> str:
    """Replace Jinja's own filter, which escapes HTML: models do not expect that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **other)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def template_variables(
    messages: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any] | None,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the variables of a prompt, by default up to the start of the assistant's message. `extra`: others."""
    names: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
    return (
        names
        | {**(extra or {}), **special_tokens, "messages": list(messages)}
        | ({"tools": list(tools)} if tools else {})
    )


class ChatTemplate:
    def __init__(self, source: str) -> None:
        environment = chat_environment()
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = compile_template(environment, source)
        except ModelSourceError as error:
            raise TemplateError(error.message) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except TemplateError as error:
            raise TemplateError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise TemplateError(f"the model's chat template breaks the sandbox: {error}") from error
        except _FAILURES as error:
            raise TemplateError(
                f"the model's chat template cannot render these messages: {error}"
            ) from error
