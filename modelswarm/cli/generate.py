"""`modelswarm generate PROMPT...`: continues texts. The options are in `commands/generate.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import click

from modelswarm.cli.json_output.completion import print_completion
from modelswarm.cli.options.model import choose_model
from modelswarm.cli.terminal.endings import LENGTH, length_remark
from modelswarm.cli.terminal.printing import print_piece
from modelswarm.client.api import AsyncClient, Completion, Usage
from modelswarm.errors import ModelSwarmError, UserError


class PromptError(ModelSwarmError):
    """One of several prompts failed."""

    def __init__(self, number: int, count: int, error: ModelSwarmError) -> None:
        sentence = str(error)
        if isinstance(error, UserError) and error.field == "prompt":
            sentence = error.message  # the number says which prompt
        super().__init__(f"prompt {number} of {count}: {sentence}")
        self.is_user_error = error.is_user_error


def run_generate(
    base: str, model: str | None, prompts: Sequence[str], fields: dict[str, Any], as_json: bool
) -> None:
    """Print the continuations of all prompts, in the order of the prompts. They run side by side."""
    asyncio.run(_generate(base, model, prompts, fields, as_json))


def run_stream(base: str, model: str | None, prompt: str, fields: dict[str, Any]) -> None:
    """Print the continuation of one prompt piece by piece."""
    asyncio.run(_stream(base, model, prompt, fields))


async def _generate(
    base: str, model: str | None, prompts: Sequence[str], fields: dict[str, Any], as_json: bool
) -> None:
    async with AsyncClient(base) as client:
        chosen = choose_model(await client.models(), model)
        number = 0
        async for answer in _answers(client, chosen.name, prompts, fields):
            if as_json:
                print_completion(number, answer)
            else:
                _print_texts(number, len(prompts), answer, chosen.max_length)
            number += 1


async def _answers(
    client: AsyncClient, model: str, prompts: Sequence[str], fields: dict[str, Any]
) -> AsyncIterator[Completion]:
    """Yield the answers in the order of the prompts. The first error, in this order, ends all."""
    tasks = [
        asyncio.create_task(client.complete(prompt, model=model, **fields)) for prompt in prompts
    ]
    try:
        for number, task in enumerate(tasks, start=1):
            try:
                answer = await task
            except ModelSwarmError as error:
                if len(prompts) == 1:
                    raise
                raise PromptError(number, len(prompts), error) from error
            yield answer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _print_texts(number: int, n_prompts: int, answer: Completion, context: int | None) -> None:
    """Print all choices, with a line before each if there are several; a single one also gets a remark on its end."""
    for choice in answer.choices:
        if n_prompts > 1 or len(answer.choices) > 1:
            click.echo(f"--- prompt {number + 1}, answer {choice.index + 1}")
        print_piece(choice.text)
        click.echo()
    if n_prompts == len(answer.choices) == 1 and answer.finish_reason == LENGTH:
        click.echo(_remark(answer.usage, context), err=True)


async def _stream(base: str, model: str | None, prompt: str, fields: dict[str, Any]) -> None:
    finish, usage = None, None
    async with AsyncClient(base) as client:
        chosen = choose_model(await client.models(), model)
        chunks = client.stream_complete(prompt, model=chosen.name, **fields)
        async with aclosing(chunks):
            async for chunk in chunks:
                print_piece(chunk.text)
                finish, usage = chunk.finish_reason or finish, chunk.usage or usage
    click.echo()
    if finish == LENGTH and usage is not None:
        click.echo(_remark(usage, chosen.max_length), err=True)


def _remark(usage: Usage, context: int | None) -> str:
    counts = {
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    return length_remark(counts, context)
