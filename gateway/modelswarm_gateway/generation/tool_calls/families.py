"""The table of families: how their models write tool calls and reasoning, and how a model's family is found.

A family is found by what the model's chat template writes, or named by the gateway's `--tool-call-parser`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelswarm_gateway.generation.tool_calls import deepseek, harmony, mistral, pythonic
from modelswarm_gateway.generation.tool_calls.deepseek import DeepSeekReader
from modelswarm_gateway.generation.tool_calls.harmony import HarmonyReader
from modelswarm_gateway.generation.tool_calls.hermes import HermesReader
from modelswarm_gateway.generation.tool_calls.llama import TAG, LlamaReader
from modelswarm_gateway.generation.tool_calls.mistral import MistralReader
from modelswarm_gateway.generation.tool_calls.pythonic import PythonicReader
from modelswarm_gateway.generation.tool_calls.qwen_xml import QwenXmlReader
from modelswarm_gateway.generation.tool_calls.reader import END_THINK, THINK, OutputReader


@dataclass(frozen=True, slots=True)
class Family:
    """One way to write tool calls."""

    reader: type[OutputReader]
    in_template: tuple[str, ...]  # texts, all of which its chat templates have
    markers: tuple[str, ...] = ()  # that may be special tokens: they are decoded for the parser
    id_length: int = 24  # letters and digits of a call's id
    id_prefix: str = "call_"
    takes_argument_text: bool = False  # its templates take arguments as text, not as a mapping


# The first family whose texts a template has is the model's. The names are those of vLLM's --tool-call-parser.
FAMILIES: Mapping[str, Family] = {
    "openai": Family(
        HarmonyReader,
        ("<|channel|>", "<|message|>"),
        (harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, harmony.START, *harmony.ENDS),
    ),
    "mistral": Family(
        MistralReader,
        ("[TOOL_CALLS]",),
        (mistral.BEGIN, mistral.CALL_ID, mistral.ARGS),
        id_length=9,  # Mistral's templates refuse others
        id_prefix="",
    ),
    "deepseek": Family(
        DeepSeekReader,
        ("<｜tool▁calls▁begin｜>",),
        (deepseek.BEGIN, deepseek.END, deepseek.CALL_BEGIN, deepseek.CALL_END, deepseek.SEPARATOR),
        takes_argument_text=True,
    ),
    "qwen3_coder": Family(
        QwenXmlReader, ("<tool_call>", "<function="), ("<tool_call>", "</tool_call>")
    ),
    "hermes": Family(HermesReader, ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    "pythonic": Family(PythonicReader, ("<|python_start|>",), (pythonic.BEGIN, pythonic.END)),
    "llama3_json": Family(LlamaReader, ("<|python_tag|>",), (TAG,)),
}
# Texts of templates whose calls look like those of a family, and are not.
_OTHERS = ("<arg_key>", "<invoke name=", "<|tool_calls_section_begin|>")
NO_PARSER = "none"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The form in which one model writes tool calls and reasoning."""

    family: Family | None = None
    family_name: str = ""
    has_reasoning: bool = False
    refusal: str = ""  # why requests with tools are refused; "" if they are not
    template: str = ""  # of its chats; tells which form of a family's calls the model writes

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the markers that its parser reads, tool calls or not."""
        own = self.family.markers if self.family else ()
        return (*own, THINK, END_THINK) if self.has_reasoning else own

    @property
    def is_harmony(self) -> bool:
        """Return whether even plain text has markers."""
        return self.family_name == "openai"


NO_FORMAT = ChatFormat()


def find_format(template: str, parser: str = "") -> ChatFormat:
    """Return the format of a model with this chat template. `parser`: a family's name, NO_PARSER, or "" to find it."""
    has_reasoning = END_THINK in template
    if parser == NO_PARSER:
        detail = f"the gateway runs with --tool-call-parser {NO_PARSER}"
        return ChatFormat(has_reasoning=has_reasoning, refusal=detail, template=template)
    name = parser or _find_family(template)
    family = FAMILIES[name] if name else None
    return ChatFormat(family, name, has_reasoning, _refusal(template, family), template)


def _find_family(template: str) -> str:
    """Return the name of the family; "" if it is unknown."""
    if any(text in template for text in _OTHERS):
        return ""
    for name, family in FAMILIES.items():
        if all(text in template for text in family.in_template):
            return name
    return ""


def _refusal(template: str, family: Family | None) -> str:
    if family is None:
        known = ", ".join(FAMILIES)
        return f"no parser of tool calls is known for this model's chat template; known: {known}"
    if "tools" not in template:
        return "this model's chat template does not show tools to the model"
    return ""
