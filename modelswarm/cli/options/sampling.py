"""The options of `generate` and `chat` for an answer: its end, the sampling, its form. `/set` of a chat has them too.

One table: an option, and the field of the request that it sets. An option that is not given is not sent; the gateway
then uses the model's generation_config.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from modelswarm.errors import UserError


def number(text: str) -> float:
    """Return a number. nan and inf are refused, because JSON cannot carry them; the gateway checks all other values."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise click.BadParameter(f"{text} is not allowed; allowed: a number")
    return value


def token_bias(text: str) -> tuple[str, float]:
    """Return the token id and the number of `ID=BIAS`."""
    token, sign, bias = text.partition("=")
    if not sign or not token.isdecimal():
        raise click.BadParameter(f"{text!r} is not allowed; allowed: ID=BIAS, such as 17=-100")
    return token, number(bias)


def early_stopping(text: str) -> bool | str:
    """Return the field's value. False is what the gateway does without it."""
    values: dict[str, bool | str] = {"true": True, "never": "never"}
    if text not in values:
        raise click.BadParameter(f"{text!r} is not allowed; allowed: true or never")
    return values[text]


def text_or_file(text: str) -> str:
    """Return the text, or with `@` before it the content of the file that it names."""
    if not text.startswith("@"):
        return text
    path = Path(text.removeprefix("@"))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{path}: not UTF-8 (byte {error.start})") from None


@dataclass(frozen=True, slots=True)
class FieldOption:
    """An option, and the field of the request that it sets."""

    option: str
    field: str
    kind: Callable[[str], Any]  # of its text; bool: a flag, which sets `set_to`
    help: str
    metavar: str | None = None
    multiple: bool = False  # may be given several times; the field is a list
    set_to: bool = True

    @property
    def parameter(self) -> str:
        """Return the name under which click hands the value over."""
        return self.option.removeprefix("--").replace("-", "_")

    def decorate(self, command: Callable[..., Any]) -> Callable[..., Any]:
        """Add the option to a command."""
        if self.kind is bool:
            return click.option(self.option, is_flag=True, help=self.help)(command)
        return click.option(
            self.option,
            type=self.kind,
            metavar=self.metavar,
            multiple=self.multiple,
            help=self.help,
        )(command)


FIELD_OPTIONS = (
    FieldOption("--max-tokens", "max_tokens", int, "Maximum number of tokens.", "N"),
    FieldOption("--min-tokens", "min_tokens", int, "No end before so many tokens.", "N"),
    FieldOption("--stop", "stop", str, "End the answer before this text.", "TEXT", True),
    FieldOption(
        "--stop-token-id", "stop_token_ids", int, "End the answer at this token.", "ID", True
    ),
    FieldOption("--ignore-eos", "ignore_eos", bool, "Continue after the model's end token."),
    FieldOption("--temperature", "temperature", number, "0 is greedy.", "T"),
    FieldOption("--top-k", "top_k", int, "Sample from the K likeliest tokens.", "K"),
    FieldOption(
        "--top-p",
        "top_p",
        number,
        "Sample from the likeliest tokens with total probability P.",
        "P",
    ),
    FieldOption(
        "--min-p",
        "min_p",
        number,
        "Sample from tokens with at least P of the likeliest one's probability.",
        "P",
    ),
    FieldOption(
        "--typical-p",
        "typical_p",
        number,
        "Sample from the tokens nearest to the entropy with total probability P.",
        "P",
    ),
    FieldOption("--seed", "seed", int, "The same seed gives the same answer.", "SEED"),
    FieldOption(
        "--repetition-penalty",
        "repetition_penalty",
        number,
        "Above 1: tokens of prompt and answer get less likely.",
        "X",
    ),
    FieldOption(
        "--frequency-penalty",
        "frequency_penalty",
        number,
        "Subtracted for each time that the answer has a token.",
        "X",
    ),
    FieldOption(
        "--presence-penalty",
        "presence_penalty",
        number,
        "Subtracted once if the answer has a token.",
        "X",
    ),
    FieldOption(
        "--no-repeat-ngram-size",
        "no_repeat_ngram_size",
        int,
        "No sequence of N tokens occurs twice.",
        "N",
    ),
    FieldOption(
        "--logit-bias", "logit_bias", token_bias, "Added to a token's logit.", "ID=BIAS", True
    ),
    FieldOption("--bad-word", "bad_words", str, "Never generate this text.", "TEXT", True),
    FieldOption(
        "--allowed-token-id", "allowed_token_ids", int, "Generate only these tokens.", "ID", True
    ),
    FieldOption(
        "--show-special-tokens",
        "skip_special_tokens",
        bool,
        "Show special tokens in the text.",
        set_to=False,
    ),
    FieldOption(
        "--include-stop",
        "include_stop_str_in_output",
        bool,
        "Show the text that ended the answer.",
    ),
    FieldOption(
        "--json-schema",
        "json",
        text_or_file,
        "The answer is JSON of this schema; @FILE reads it.",
        "SCHEMA",
    ),
    FieldOption("--json-object", "json_object", bool, "The answer is a JSON object."),
    FieldOption("--regex", "regex", str, "The answer matches this expression.", "REGEX"),
    FieldOption("--choice", "choice", str, "The answer is one of these texts.", "TEXT", True),
    FieldOption(
        "--grammar",
        "grammar",
        text_or_file,
        "The answer follows this Lark or GBNF grammar; @FILE reads it.",
        "GRAMMAR",
    ),
)
BEAM_OPTIONS = (
    FieldOption("--num-beams", "num_beams", int, "Search for the best answers with N beams.", "N"),
    FieldOption(
        "--length-penalty",
        "length_penalty",
        number,
        "With --num-beams: above 0 for longer answers, below 0 for shorter ones.",
        "X",
    ),
    FieldOption(
        "--early-stopping",
        "early_stopping",
        early_stopping,
        "With --num-beams: true ends at the first N answers, never when no better one is possible.",
        "WHEN",
    ),
)
_STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")  # of structured_outputs


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all options of this module to a command."""
    for option in (
        click.option("--greedy", is_flag=True, help="Always take the likeliest token."),
        click.option(
            "--do-sample",
            is_flag=True,
            help="Sample tokens. Default: as the model's own settings say.",
        ),
    ):
        command = option(command)
    for field_option in reversed(FIELD_OPTIONS):
        command = field_option.decorate(command)
    return command


def beam_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a beam search, which a chat cannot have: its answers are of a session."""
    for option in reversed(BEAM_OPTIONS):
        command = option.decorate(command)
    return command


def request_fields(do_sample: bool = False, greedy: bool = False, **given: Any) -> dict[str, Any]:
    """Return the request's fields. UserError for options that contradict each other."""
    return gather_structure(option_fields(do_sample, greedy, **given))


def option_fields(do_sample: bool = False, greedy: bool = False, **given: Any) -> dict[str, Any]:
    """Return the fields of all given options. `--do-sample` alone means temperature 1, `--greedy` temperature 0.

    UserError for options that contradict each other.
    """
    fields = {
        option.field: field_value(option, given[option.parameter])
        for option in (*FIELD_OPTIONS, *BEAM_OPTIONS)
        if _is_given(given.get(option.parameter))
    }
    temperature = _temperature(fields.get("temperature"), do_sample, greedy)
    if temperature is not None:
        fields["temperature"] = temperature
    return fields


def gather_structure(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the form of the answer in `structured_outputs`. UserError for two forms."""
    forms = [option for option in FIELD_OPTIONS if option.field in fields]
    forms = [option for option in forms if option.field in _STRUCTURES]
    if len(forms) > 1:
        first, second = forms[0].option, forms[1].option
        raise UserError(first, f"contradicts {second}; allowed: one of them")
    others = {name: value for name, value in fields.items() if name not in _STRUCTURES}
    return others | (
        {"structured_outputs": {forms[0].field: fields[forms[0].field]}} if forms else {}
    )


def _is_given(value: Any) -> bool:
    """Return whether click found the option; 0 is a value."""
    return value is not None and value is not False and value != ()


def field_value(option: FieldOption, value: Any) -> Any:
    """Return a value as the field has it."""
    if option.kind is bool:
        return option.set_to
    if option.field == "logit_bias":
        return dict(value)
    if option.field == "json":
        return _parse_schema(value)
    return list(value) if option.multiple else value


def _parse_schema(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError("--json-schema", f"not JSON ({error}); allowed: a JSON schema") from None


def _temperature(temperature: float | None, do_sample: bool, greedy: bool) -> float | None:
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
        return 0.0
    return 1.0 if do_sample and temperature is None else temperature
