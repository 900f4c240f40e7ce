"""Finds a model's chat template among its files, and compiles it as gateways do.

A template that the user wrote into the swarm is refused if it does not compile. With the model's own one, or without
any, the model serves text completions, and `template_fault` is the sentence about it. Gateways take
`chat_environment`, `compile_template` and `select_template` from here. Jinja is imported with this module: import the
module late where only torch brings Jinja along. Knows no messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from modelswarm.checkpoint.json_files import read_json
from modelswarm.errors import ModelSourceError

TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
TOKENIZER_SETTINGS_FILE = "tokenizer_config.json"
MAX_TEMPLATE_CHARACTERS = 1 << 20
# The operators that a sandbox may leave to itself, all of which Jinja would compute for constants while it compiles.
_OPERATORS = frozenset({"+", "-", "*", "/", "//", "**", "%"})


class GenerationExtension(jinja2.ext.Extension):
    """Renders `{% generation %}` as its body; the tag marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment of chat templates, without Hugging Face's helpers.

    It does not optimise: that would compute constants, such as a letter times a billion, when a model is first seen.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationExtension, jinja2.ext.loopcontrols],
        optimized=False,
    )
    environment.globals.pop("lipsum", None)  # it makes texts of any length
    return environment


def compile_template(environment: jinja2.Environment, text: str) -> jinja2.Template:
    """Return the compiled template. Raise ModelSourceError with the line if it does not compile."""
    if len(text) > MAX_TEMPLATE_CHARACTERS:
        detail = f"it has {len(text)} characters; allowed: {MAX_TEMPLATE_CHARACTERS}"
        raise _compile_error(detail)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise _compile_error(f"line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        # SyntaxError comes from the Python code that Jinja generates, as for a `break` outside of loops.
        raise _compile_error(str(error)) from error


def check_template(text: str) -> None:
    """Raise ModelSourceError with the line if the template does not compile. Computes no part of it."""
    environment = chat_environment()
    # Jinja computes constant outputs even if it does not optimise, but neither such operators nor such functions.
    environment.intercepted_binops = _OPERATORS
    environment.filters = dict.fromkeys(environment.filters, _not_constant)
    environment.tests = dict.fromkeys(environment.tests, _not_constant)
    compile_template(environment, text)


@jinja2.pass_context
def _not_constant(context: jinja2.runtime.Context, *values: Any, **options: Any) -> Any:
    """Stand for a filter or test in a template that is never rendered."""
    raise NotImplementedError


def select_template(jinja: str | None, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the model's template and the name of its file; None if it has none.

    `jinja`: content of TEMPLATE_FILE. `settings`: TOKENIZER_SETTINGS_FILE, with a string or a list of named ones.
    """
    if jinja is not None:
        return jinja, TEMPLATE_FILE
    source = _named_templates(settings).get("default")
    return (source, TOKENIZER_SETTINGS_FILE) if isinstance(source, str) else None


def tool_template(settings: Mapping[str, Any]) -> str:
    """Return the settings' template of requests with tools, as in Hermes 3; "" if one template serves all."""
    source = _named_templates(settings).get("tool_use")
    return source if isinstance(source, str) else ""


def _named_templates(settings: Mapping[str, Any]) -> dict[Any, Any]:
    source = settings.get("chat_template")
    if not isinstance(source, list):
        return {"default": source}
    return {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}


def template_fault(folder: Path) -> str | None:
    """Return one sentence if the template in a tokenizer's folder is missing, or does not compile, with its line."""
    jinja, settings = folder / TEMPLATE_FILE, folder / TOKENIZER_SETTINGS_FILE
    text = jinja.read_text(encoding="utf-8", errors="replace") if jinja.is_file() else None
    found = select_template(text, read_json(settings) if settings.is_file() else {})
    if found is None:
        return (
            f"{folder} has no chat template; text completions work, "
            "chats are refused until spec.model.chatTemplate gives one"
        )
    template, file = found
    try:
        check_template(template)
    except ModelSourceError as error:
        return (
            f"{folder / file}: {error.message}; text completions work, "
            "chats are refused until spec.model.chatTemplate replaces it"
        )
    return None


def _compile_error(detail: str) -> ModelSourceError:
    return ModelSourceError("chat_template", f"the chat template does not compile: {detail}")
