"""The facts of `generate`: the text, the reason for its end, and the tokens used."""

from __future__ import annotations

from typing import Any

from modelswarm.cli.facts.printing import print_json
from modelswarm.client.openai import OpenAIClient

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def print_completion(base: str, model: str | None, prompt: str, fields: dict[str, Any]) -> None:
    """Print the continuation of `prompt` by the gateway at `base` as one line of JSON."""
    text, finish_reason, usage = "", None, dict[str, int]()
    with OpenAIClient(base) as client:
        chosen = client.choose_model(model)
        for chunk in client.stream_completion(chosen.name, prompt, **fields):
            text += chunk.text
            finish_reason = chunk.finish_reason or finish_reason
            usage.update(chunk.usage or {})
    print_json(
        {
            "model": chosen.name,
            "text": text,
            "finish_reason": finish_reason,
            "usage": {name: usage.get(name, 0) for name in _USAGE},
        }
    )
