"""The sampling options of `generate` and `chat`.

An option that is not given is not sent; the gateway then uses the model's generation_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from modelswarm.errors import UserError


def _require_finite(
    context: click.Context, parameter: click.Parameter, value: float | None
) -> float | None:
    """Refuse nan and inf, which JSON cannot carry to the gateway. The gateway checks all other values."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not allowed; allowed: a number")
    return value


_OPTIONS = (
    click.option("--max-tokens", type=int, metavar="N", help="Maximum number of tokens."),
    click.option(
        "--temperature",
        type=float,
        callback=_require_finite,
        metavar="T",
        help="Sampling temperature; 0 is greedy.",
    ),
    click.option("--top-k", type=int, metavar="K", help="Sample from the K likeliest tokens."),
    click.option(
        "--top-p",
        type=float,
        callback=_require_finite,
        metavar="P",
        help="Sample from the likeliest tokens with total probability P.",
    ),
    click.option(
        "--do-sample", is_flag=True, help="Sample tokens. Default: as the model's own settings say."
    ),
    click.option("--greedy", is_flag=True, help="Always take the likeliest token."),
    click.option("--seed", type=int, metavar="SEED", help="The same seed gives the same answer."),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def request_fields(
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    do_sample: bool,
    greedy: bool,
    seed: int | None,
) -> dict[str, Any]:
    """Return the request's fields. `--do-sample` alone means temperature 1, `--greedy` temperature 0.

    UserError for options that contradict each other.
    """
    if do_sample and greedy:
        raise UserError("--greedy", "contradicts --do-sample; allowed: one of them")
    if greedy and temperature:
        raise UserError(
            "--greedy", f"contradicts --temperature {temperature:g}; allowed: one of them"
        )
    if do_sample and temperature == 0:
        raise UserError(
            "--do-sample", "contradicts --temperature 0; allowed: a temperature above 0"
        )
    if greedy:
        temperature = 0.0
    elif do_sample and temperature is None:
        temperature = 1.0
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
