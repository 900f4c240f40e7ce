"""The JSON of `generate`: the answers to one prompt, their ends, and the tokens used."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from modelswarm.cli.json_output.printing import print_json

if TYPE_CHECKING:
    from modelswarm.client.api import Choice, Completion

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def print_completion(number: int, answer: Completion) -> None:
    """Print the answers to a prompt as one line of JSON. `number`: of the prompt, from 0."""
    print_json(completion_fields(number, answer))


def completion_fields(number: int, answer: Completion) -> dict[str, Any]:
    """Return the object of `generate --json`."""
    counts = asdict(answer.usage)
    return {
        "model": answer.model,
        "prompt": number,
        "choices": [_choice_fields(choice) for choice in answer.choices],
        "usage": {name: counts[name] for name in _USAGE},
    }


def _choice_fields(choice: Choice) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else [asdict(each) for each in choice.logprobs]
    return {
        "index": choice.index,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "logprobs": logprobs,
        "prompt_logprobs": choice.prompt_logprobs,
    }
