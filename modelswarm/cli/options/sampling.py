"""The options by which a person chooses how tokens are picked; the same for `generate` and `chat`.

What is not given is left to the model's generation_config.json, as the gateway does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click


def _require_finite(
    context: click.Context, parameter: click.Parameter, value: float | None
) -> float | None:
    """JSON has no word for nan and inf, so the gateway could not refuse them; the rest it checks itself."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not allowed; allowed: a number")
    return value


_OPTIONS = (
    click.option("--max-tokens", type=int, metavar="N", help="Most tokens of the answer."),
    click.option(
        "--temperature",
        type=float,
        callback=_require_finite,
        metavar="T",
        help="Spread of the choice; 0 is greedy.",
    ),
    click.option("--top-k", type=int, metavar="K", help="Choose among the K likeliest tokens."),
    click.option(
        "--top-p",
        type=float,
        callback=_require_finite,
        metavar="P",
        help="Choose among the likeliest tokens that make up P.",
    ),
    click.option(
        "--do-sample/--greedy",
        default=None,
        help="Draw tokens at random, or always take the likeliest; without either the model's own default.",
    ),
    click.option(
        "--seed", type=int, metavar="SEED", help="The same seed gives the same answer again."
    ),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def request_fields(
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    do_sample: bool | None,
    seed: int | None,
) -> dict[str, Any]:
    """The request's fields. `--do-sample` alone means temperature 1, `--greedy` temperature 0."""
    if do_sample is False:
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
