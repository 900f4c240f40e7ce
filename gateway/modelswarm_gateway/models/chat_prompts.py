"""The chat prompts of one model: its template in the template process, and whether the model can chat at all.

Used by `tokenizer.py`. A template that does not compile, or that exceeds its time or memory twice, ends the chats of
this model only; completions need no template. Knows no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from modelswarm_gateway.models.chat_template import TemplateError, template_variables
from modelswarm_gateway.models.template_process import TemplateBudgetError, TemplateProcess

# Times that a template may exceed its time or memory before the model's chats are refused.
MAX_BUDGET_FAILURES = 2
# Bytes of a request with messages; those of a larger one may be the cause, so it does not count.
SMALL_REQUEST_BYTES = 64 << 10
_NO_TEMPLATE = "this model has no chat template"


class ChatPrompts:
    def __init__(
        self,
        template: tuple[str, str] | None,
        special_tokens: Mapping[str, str],
        templates: TemplateProcess,
    ) -> None:
        """Compile `template`, a text and the name of its file. Call it in a thread. Raise TemplateProcessError."""
        self._text, self._file = template or ("", "")
        self._special_tokens, self._templates = special_tokens, templates
        self._budget_failures = 0
        self._turn = asyncio.Semaphore(
            1
        )  # so that one model never waits for two requests of another
        self._fault = _NO_TEMPLATE
        if template:
            self._fault = ""
            self._compile()

    @property
    def fault(self) -> str:
        """Return the sentence that chats are refused with; "" if the model can chat."""
        return f"{self._fault}; text completions work" if self._fault else ""

    async def render(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None
    ) -> str:
        """Return the prompt. Raise TemplateError or TemplateProcessError."""
        async with self._turn:
            if self._fault:
                raise TemplateError(self.fault)
            variables = template_variables(messages, extra, self._special_tokens)
            try:
                return await self._templates.render(self._text, variables)
            except TemplateBudgetError as error:
                # A character of the template takes up to six bytes.
                if error.request_bytes <= SMALL_REQUEST_BYTES + 6 * len(self._text):
                    self._count_failure(error)
                raise

    def _compile(self) -> None:
        while not self._fault:
            try:
                return self._templates.check(self._text)
            except TemplateBudgetError as error:
                self._count_failure(error)
            except TemplateError as error:
                self._fault = f"{self._file}: {error}"

    def _count_failure(self, error: TemplateBudgetError) -> None:
        self._budget_failures += 1
        if self._budget_failures >= MAX_BUDGET_FAILURES:
            self._fault = f"{self._file}: {error}, {MAX_BUDGET_FAILURES} times"
