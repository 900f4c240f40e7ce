"""The prompts of chats with one model: requests that render its template, and whether it can chat at all.

Used by `tokenizer.py`. A template that does not compile, or that exceeds its time or memory twice, ends the chats of
this model only; completions need no template. Knows no tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from modelswarm_gateway.models.chat_template import TemplateError, template_variables
from modelswarm_gateway.models.model_process import CPU_SECONDS, BudgetError, Request, pack_request
from modelswarm_gateway.models.model_requests import SMALL_REQUEST_BYTES, ModelRequests
from modelswarm_gateway.models.model_worker import MAX_TEXT_CHARACTERS

# Times that a template may exceed its time or memory before the model's chats are refused.
MAX_BUDGET_FAILURES = 2
# Processor time to tokenize a character of a large prompt, in seconds; usual is a fifth.
CPU_SECONDS_PER_CHARACTER = 5e-6
# Put behind the last message's text to find its end. Templates may trim the text, and with it the tag's blank.
_END_TAG = "\ue0a5end\ue0a5 "
_NO_TEMPLATE = "this model has no chat template"


def large_seconds(characters: int) -> float:
    """Return the processor time to tokenize a large prompt of so many characters."""
    return CPU_SECONDS + CPU_SECONDS_PER_CHARACTER * min(characters, MAX_TEXT_CHARACTERS)


class TemplateBudgetError(TemplateError):
    """The template took too much time or memory."""


class ChatPrompts:
    def __init__(
        self,
        template: tuple[str, str] | None,
        special_tokens: Mapping[str, str],
        requests: ModelRequests,
        cpu_seconds: float,
        tool_text: str = "",
    ) -> None:
        """Compile `template`, a text and the name of its file. Call it in a thread. Raise ModelProcessError.

        `cpu_seconds`: processor time of one request. `tool_text`: template of requests with tools; "": the same.
        """
        self._text, self._file = template or ("", "")
        self._tool_text = tool_text
        self._special_tokens, self._requests = special_tokens, requests
        self._cpu_seconds = cpu_seconds
        self._budget_failures = Counter[bool]()  # of each template; True: of that for tools
        self._fault, self._tool_fault = _NO_TEMPLATE, ""
        if template:
            self._fault = ""
            self._compile()

    def template(self, *, has_tools: bool) -> str:
        """Return the template's text; "" without one."""
        return self._tool_text if has_tools and self._tool_text else self._text

    @property
    def fault(self) -> str:
        """Return the sentence that chats are refused with; "" if the model can chat."""
        return f"{self._fault}; text completions work" if self._fault else ""

    def request(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any] | None,
        limit: int,
        after: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        continues: bool = False,
    ) -> tuple[Request, bool]:
        """Return the request for the prompt's tokens, and whether it is large. Raise TemplateError.

        `limit`: positions of the context. `after`: only the tokens of the text behind this one. `continues`: only
        those up to the end of the last message's text.
        """
        if self._fault:
            raise TemplateError(self.fault)
        if tools and self._tool_fault:
            raise TemplateError(f"{self._tool_fault}; chats without tools work")
        if continues:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + _END_TAG}]
        variables = template_variables(messages, extra, self._special_tokens, tools)
        text = self.template(has_tools=bool(tools))
        fields = {"template": text, "variables": variables, "limit": limit, "after": after}
        fields["until"] = _END_TAG if continues else ""
        try:
            request = pack_request(fields, self._cpu_seconds, self._cpu_seconds)
        except (RecursionError, ValueError) as error:
            raise TemplateError(f"the messages cannot be given to a template: {error}") from error
        # A character of the template takes up to six bytes.
        is_large = len(request.content) > SMALL_REQUEST_BYTES + 6 * len(text)
        if is_large:
            request = pack_request(fields, self._cpu_seconds, large_seconds(len(request.content)))
        return request, is_large

    def failure(
        self, error: BudgetError, is_large: bool, *, has_tools: bool = False
    ) -> TemplateError:
        """Return the error of a template that exceeded its time or memory; count it if the request is not large."""
        raised = TemplateBudgetError(f"the model's chat template {error}")
        if not is_large:
            self._count_failure(raised, is_for_tools=has_tools and bool(self._tool_text))
        return raised

    def _compile(self) -> None:
        while not self._fault:
            try:
                head, _ = self._requests.ask_now(
                    pack_request({"template": self._text}, self._cpu_seconds)
                )
            except BudgetError as error:
                self.failure(error, is_large=False)
            else:
                self._fault = f"{self._file}: {head['refused']}" if "refused" in head else ""
                return

    def _count_failure(self, error: TemplateBudgetError, *, is_for_tools: bool = False) -> None:
        self._budget_failures[is_for_tools] += 1
        if self._budget_failures[is_for_tools] >= MAX_BUDGET_FAILURES:
            fault = f"{self._file}: {error}, {MAX_BUDGET_FAILURES} times"
            if is_for_tools:
                self._tool_fault = fault
            else:
                self._fault = fault
