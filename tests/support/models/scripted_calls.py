"""A scripted answer with reasoning, a sentence and two tool calls in Hermes's form, for tests of real clients."""

from __future__ import annotations

import json

NUMBERS = list(range(100, 200))
ARGUMENTS = {"city": "Berlin", "numbers": NUMBERS}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
ANSWER = (
    "<think>\nWhich city?\n</think>\n\nLet me see.\n<tool_call>\n" + CALL + "\n</tool_call>\n"
    '<tool_call>{"name": "clock"}</tool_call>'
)
