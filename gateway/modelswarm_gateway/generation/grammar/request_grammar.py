"""The grammar that an answer is held to: that of its tool calls, reasoning and format, or the client's own.

Used by the service. Compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelswarm.protocol.messages import MAX_FORCED_TOKENS, Grammar
from modelswarm_gateway.errors import invalid_field
from modelswarm_gateway.generation.grammar.answer_grammar import answer_grammar
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarSource
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.tool_calls.answer import PROMPT_END_TOKENS
from modelswarm_gateway.generation.tool_calls.families import ChatFormat
from modelswarm_gateway.models.tokenizer import ModelTokenizer


def request_grammar(
    request: GenerationRequest, form: ChatFormat, tokenizer: ModelTokenizer, prompt: Sequence[int]
) -> GrammarSource | None:
    """Return the grammar of the answer; None if it has none. Raise ApiError. `prompt`: its tokens."""
    source = _answer_grammar(request, form, tokenizer, prompt)
    return source or _with_tokens(request.grammar, tokenizer)


def _with_tokens(source: GrammarSource | None, tokenizer: ModelTokenizer) -> GrammarSource | None:
    """Return a client's grammar with the model's tokens that it names."""
    if source is None or source.kind not in (GrammarKind.GRAMMAR, GrammarKind.STRUCTURAL_TAG):
        return source
    try:
        found = tokenizer.tokens_within(source.text)
    except ValueError as error:
        raise invalid_field(source.param, str(error)) from error
    return replace(source, tokens=tuple(sorted(found.items())))


def _answer_grammar(
    request: GenerationRequest, form: ChatFormat, tokenizer: ModelTokenizer, prompt: Sequence[int]
) -> GrammarSource | None:
    """Return the grammar of an answer with calls, or with reasoning and a format; None if none is needed.

    Raise ApiError.
    """
    answer = request.answer
    if answer is None or not (answer.is_constrained or answer.has_format):
        return None
    if request.options.ignore_eos:
        detail = "an answer whose calls are constrained ends by itself; leave ignore_eos out"
        raise invalid_field("ignore_eos", detail)
    special = tokenizer.tokens_within("\n".join(form.markers))
    end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], form.markers)
    content = request.grammar if answer.has_format else None
    return answer_grammar(answer, form, end, special, content)


def with_forced_tokens(grammar: Grammar, request: GenerationRequest) -> Grammar:
    """Let forced tokens go without steps of their own, unless the request asks for log probabilities or rows."""
    is_plain = request.options.logprobs is None and request.rows is None
    most = MAX_FORCED_TOKENS if is_plain else 0
    return replace(grammar, max_forced=most)
