"""Plain sentences for what is wrong with a field of a request: what is allowed, and what was sent.

Used by `openai_requests.py` for the findings of pydantic, whose own words describe Python types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import ValidationError

from modelswarm.protocol.messages import MAX_LOGPROBS
from modelswarm_gateway.api.fields.request_model import FIELD_ERROR
from modelswarm_gateway.api.fields.states import FieldError
from modelswarm_gateway.errors import MAX_QUOTED, ApiError, invalid_request, shorten
from modelswarm_gateway.generation.request import (
    MAX_SESSION_ID_LENGTH,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)
from modelswarm_gateway.generation.sampling_ranges import LIST_WORDS, RANGES

_FLAG = "true or false"
_TEXT = "a string"
# Field -> what it may be; of all models of `openai_requests.py`.
ALLOWED = {
    "model": "the name of a model, a string that is not empty",
    "messages": "a list of at least one message, each an object",
    "prompt": "a string, a list of token ids (whole numbers from 0), or a list of such prompts of one kind",
    **{name: allowed.words for name, allowed in RANGES.items()},
    **LIST_WORDS,
    "max_completion_tokens": RANGES["max_tokens"].words,
    "stop": f"a string of 1 to {MAX_STOP_LENGTH} characters, or a list of at most {MAX_STOPS} such strings",
    "stream": _FLAG,
    "stream_options": "an object",
    "include_usage": _FLAG,
    "continuous_usage_stats": _FLAG,
    "ignore_eos": _FLAG,
    "response_format": "an object",
    "structured_outputs": "an object",
    "guided_json": "a JSON schema, an object or its text",
    "guided_regex": _TEXT,
    "guided_choice": "a list of strings",
    "guided_grammar": _TEXT,
    "guided_whitespace_pattern": _TEXT,
    "grammar": _TEXT,
    "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
    "prompt_logprobs": f"a whole number from 0 to {MAX_LOGPROBS}",
    "skip_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "truncate_prompt_tokens": "a whole number from 1, or -1 for as many as leave room for the answer",
    "truncation_side": '"left" or "right"',
    "n": "a whole number from 1 to 128",
    "num_beams": f"a whole number from 1 to {MAX_LOGPROBS}",
    "use_beam_search": _FLAG,
    "length_penalty": "a number from -10 to 10",
    "early_stopping": 'true, false or "never"',
    "echo": _FLAG,
    "top_logprobs": f"a whole number from 0 to {MAX_LOGPROBS}",
    "logprobs": f"true or false for a chat, a whole number from 0 to {MAX_LOGPROBS} for a text completion",
    "session_id": f"a string of 1 to {MAX_SESSION_ID_LENGTH} characters",
    "max_length": "a whole number from 2 to 2147483647",
    "ttl": "a whole number of seconds, from 1 to 86400",
    "append": _FLAG,
    "session_position": "a whole number from 0",
    "position": "a whole number from 1",
    "reasoning_effort": _TEXT,
    "chat_template_kwargs": "an object",
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "add_special_tokens": _FLAG,
    "documents": "a list of objects",
    "return_token_strs": _FLAG,
    "tokens": "a list of token ids (whole numbers from 0)",
    "tools": "a list of objects",
    "tool_choice": "none, auto, required, or an object that names a function",
    "parallel_tool_calls": _FLAG,
    "include_reasoning": _FLAG,
    "role": "one of developer, system, user, assistant and tool",
    "content": "a string, or a list of text parts, which are objects",
    "name": _TEXT,
    "tool_calls": "a list of objects",
    "tool_call_id": _TEXT,
    "reasoning": _TEXT,
    "reasoning_content": _TEXT,
    "type": '"text" or "refusal"',
    "text": _TEXT,
    "refusal": _TEXT,
}


def describe(value: object) -> str:
    """Return a short text for a value of a request."""
    match value:
        case str() if len(value) > MAX_QUOTED:
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case _:
            return shorten(json.dumps(value, ensure_ascii=False))


def first_problem(error: ValidationError, allowed: Mapping[str, str] = ALLOWED) -> ApiError:
    """Return the first problem, with its path as the client would write it. `allowed`: what each field may be."""
    found = error.errors(include_url=False)
    place = found[0]["loc"][:1]
    # In a field of several types, the deepest finding is about the type that was meant.
    problem = max((p for p in found if p["loc"][:1] == place), key=lambda p: len(p["loc"]))
    path = field_path = field = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in allowed:
            path += f".{part}" if path else part
            field_path, field = path, part
    if problem["type"] == FIELD_ERROR:
        refused: FieldError = problem["ctx"]["error"]
        path += f".{refused.field}" if path else refused.field
        return ApiError(refused.code, f"{path}: {refused.problem}", param=path)
    if problem["type"] == "missing":
        return missing_field(path)
    sent = describe(problem["input"])
    end = f"not {sent}" if path == field_path else f"but {path} is {sent}"
    return invalid_request(path, f"{field_path}: must be {allowed[field]}, {end}")


def missing_field(path: str) -> ApiError:
    return invalid_request(path, f"{path}: this field is required")
