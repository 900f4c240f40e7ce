"""Options of `modelswarm generate PROMPT`. The work is in `modelswarm.cli.generate`."""

from __future__ import annotations

from typing import Any

import click

from modelswarm.cli.options.document import read_prompt
from modelswarm.cli.options.sampling import request_fields, sampling_options
from modelswarm.cli.options.target import http_target, http_target_options, model_option


@click.command()
@click.argument("prompt")
@click.option("--stream", is_flag=True, help="Print the text as it is generated.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the text, its end and its usage as JSON."
)
@model_option
@sampling_options
@http_target_options
def generate(
    prompt: str,
    stream: bool,
    as_json: bool,
    model: str | None,
    name: str | None,
    url: str | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT with the model of a running swarm. With - the prompt is read from standard input.

    Without --max-tokens, the text is continued by 16 tokens, or by max_new_tokens of the model's
    generation_config.json.
    """
    if stream and as_json:
        raise click.UsageError("--json prints one object at the end; allowed: --stream or --json")
    fields, target = request_fields(**sampling), http_target(name, url)
    model = model or target.model
    text = read_prompt(prompt)
    if as_json:
        from modelswarm.cli.facts.completion import print_completion

        print_completion(target.base, model, text, fields)
    else:
        from modelswarm.cli.generate import print_continuation

        print_continuation(target.base, model, text, fields, stream)
