"""Options of `modelswarm generate PROMPT...`. The work is in `modelswarm.cli.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from modelswarm.cli.options.checkpoint import Checkpoint, checkpoint_options
from modelswarm.cli.options.document import STANDARD_INPUT, read_prompt, read_prompt_file
from modelswarm.cli.options.sampling import beam_options, request_fields, sampling_options
from modelswarm.cli.options.target import http_target, http_target_options, model_option
from modelswarm.errors import UserError


@click.command()
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--file",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A prompt, without its last line end. May be repeated; these come after the PROMPTs.",
)
@click.option("--stream", is_flag=True, help="Print the text as it is generated.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print texts, ends and usage as JSON, a line a prompt."
)
@click.option("--n", type=int, metavar="N", help="Answers to each prompt.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json: log probabilities of each token and the N likeliest ones.",
)
@click.option(
    "--prompt-logprobs",
    type=int,
    metavar="N",
    help="With --json: those of the prompt, in vLLM's form.",
)
@click.option("--echo", is_flag=True, help="Print the prompt before its continuation.")
@checkpoint_options
@model_option
@sampling_options
@beam_options
@http_target_options
def generate(
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    stream: bool,
    as_json: bool,
    n: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    echo: bool,
    checkpoint_path: str | None,
    tokenizer_name: str | None,
    spans: int | None,
    device: str | None,
    model: str | None,
    name: str | None,
    url: str | None,
    **sampling: Any,
) -> None:
    """Continue each PROMPT with the model of a running swarm, or of --checkpoint-path. - is standard input.

    Without --max-tokens, a text is continued by 16 tokens, or by max_new_tokens of the model's
    generation_config.json. Several prompts run side by side; for many, use batch.
    """
    fields = request_fields(**sampling)
    given = {"n": n, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    fields |= {field: value for field, value in given.items() if value is not None}
    fields |= {"echo": True} if echo else {}
    _check_output(stream, as_json, fields, len(prompts) + len(files))
    checkpoint = Checkpoint(checkpoint_path, tokenizer_name, spans, device)
    checkpoint.check_beside({"--name": name, "--url": url, "--model": model})
    texts = _read_prompts(prompts, files)
    with nullcontext() if checkpoint_path is None else checkpoint.running() as private:
        target = private or http_target(name, url)
        _run(target.base, model or target.model, texts, fields, stream, as_json)


def _run(
    base: str,
    model: str | None,
    texts: list[str],
    fields: dict[str, Any],
    stream: bool,
    as_json: bool,
) -> None:
    from modelswarm.cli.generate import run_generate, run_stream

    if stream:
        run_stream(base, model, texts[0], fields)
    else:
        run_generate(base, model, texts, fields, as_json)


def _read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    if prompts.count(STANDARD_INPUT) > 1:
        raise UserError("PROMPT", "- is given twice; allowed: standard input once")
    texts = [*map(read_prompt, prompts), *map(read_prompt_file, files)]
    for number, text in enumerate(texts, start=1):
        if not text:
            raise UserError(f"prompt {number}", "is empty; allowed: at least one character")
    return texts


def _check_output(stream: bool, as_json: bool, fields: dict[str, Any], n_prompts: int) -> None:
    if not n_prompts:
        raise click.UsageError("no prompt; allowed: PROMPT, --file FILE, or - for standard input")
    if stream and as_json:
        raise click.UsageError("--json prints one object at the end; allowed: --stream or --json")
    if stream and (n_prompts > 1 or fields.get("n", 1) != 1):
        raise click.UsageError("--stream prints one answer; allowed: one prompt, without --n")
    for option in ("logprobs", "prompt_logprobs"):
        if option in fields and not as_json:
            raise click.UsageError(f"--{option.replace('_', '-')} has an effect only with --json")
