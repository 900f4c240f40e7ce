"""Options of `generate` and `chat`: every field of the API has one; contradictions and empty effects are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelswarm.cli import run
from modelswarm.cli.commands.generate import generate
from modelswarm.cli.options.sampling import FIELD_OPTIONS, request_fields
from modelswarm.client.api.fields import COMPLETION_FIELDS
from modelswarm.errors import UserError

NOWHERE = ("--url", "http://127.0.0.1:1")
OTHER_OPTIONS = {  # of `generate` only
    *("n", "logprobs", "prompt_logprobs", "echo", "num_beams", "length_penalty", "early_stopping"),
}
FORMS = {"json", "json_object", "regex", "choice", "grammar"}  # of structured_outputs
LEFT_OUT = {
    # Other names of what --json-schema, --regex, --choice and --grammar send.
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "guided_whitespace_pattern"),
    # A command has no session to go on with; `chat` names its own.
    *("session_id", "append", "session_position"),
    # The text is printed, not its tokens; prompts are not cut.
    *("return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"),
    *("truncate_prompt_tokens", "truncation_side"),
    # --num-beams says more; bad words are given as texts.
    *("use_beam_search", "bad_words_ids"),
}


def test_every_field_of_completions_has_an_option() -> None:
    fields = {option.field for option in FIELD_OPTIONS} - FORMS

    assert fields | OTHER_OPTIONS | {"structured_outputs"} == COMPLETION_FIELDS - LEFT_OUT
    known = {name for parameter in generate.params for name in parameter.opts}
    assert {option.option for option in FIELD_OPTIONS} <= known
    assert {f"--{name.replace('_', '-')}" for name in OTHER_OPTIONS} <= known


def test_options_of_beams_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    fields = request_fields(num_beams=3, length_penalty=0.0, early_stopping="never")

    assert fields == {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"}
    assert run(["generate", "a", "--early-stopping", "soon", *NOWHERE]) == 2
    assert "'soon' is not allowed; allowed: true or never" in capsys.readouterr().err


def test_only_given_options_are_sent() -> None:
    nothing: dict[str, Any] = {
        option.parameter: () if option.multiple else False if option.kind is bool else None
        for option in FIELD_OPTIONS
    }

    assert request_fields(**nothing) == {}
    assert request_fields(**nothing | {"temperature": 0.0, "top_k": 0, "max_tokens": 0}) == {
        "temperature": 0.0,
        "top_k": 0,
        "max_tokens": 0,
    }
    given: dict[str, Any] = {
        "stop": ("a", "b"),
        "logit_bias": (("5", -1.0), ("6", 2.0)),
        "show_special_tokens": True,
        "choice": ("x",),
        "greedy": True,
    }
    assert request_fields(**nothing | given) == {
        "stop": ["a", "b"],
        "logit_bias": {"5": -1.0, "6": 2.0},
        "skip_special_tokens": False,
        "structured_outputs": {"choice": ["x"]},
        "temperature": 0.0,
    }


def test_schema_is_read_from_text_and_file(tmp_path: Path) -> None:
    assert request_fields(json_schema='{"type": "object"}') == {
        "structured_outputs": {"json": {"type": "object"}}
    }
    with pytest.raises(UserError, match=r"--json-schema: not JSON \(.*allowed: a JSON schema"):
        request_fields(json_schema="{")
    with pytest.raises(UserError, match="--json-schema: contradicts --regex; allowed: one"):
        request_fields(json_schema="{}", regex="a")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "no prompt; allowed: PROMPT, --file FILE, or - for standard input"),
        (("a", "b", "--stream"), "--stream prints one answer; allowed: one prompt, without --n"),
        (("a", "--n", "2", "--stream"), "--stream prints one answer"),
        (("a", "--logprobs", "2"), "--logprobs has an effect only with --json"),
        (("a", "--prompt-logprobs", "2"), "--prompt-logprobs has an effect only with --json"),
        (("-", "-"), "PROMPT: - is given twice; allowed: standard input once"),
        (("a", ""), "prompt 2: is empty; allowed: at least one character"),
        (("--file", "absent.txt"), "--file: absent.txt: no such file; allowed: a text file"),
        (("--file", "."), "--file: .: Is a directory; allowed: a text file"),
        (("a", "--logit-bias", "5:1"), "'5:1' is not allowed; allowed: ID=BIAS, such as 17=-100"),
        (("a", "--min-p", "x"), "x is not allowed; allowed: a number"),
        (("a", "--grammar", "@absent.lark"), "absent.lark: No such file or directory"),
        (("a", "--spans", "2"), "--spans: has an effect only with --checkpoint-path"),
        (("a", "--tokenizer-name", "t"), "--tokenizer-name: has an effect only with --checkpoint"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", *arguments, *NOWHERE]) == 2

    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("absent/folder/x",), "absent/folder/x: no such folder; allowed: a folder"),
        (("~unknown-user/x",), "~unknown-user/x: no such folder; allowed: a folder"),
        ((__file__,), "is a file; allowed: a folder in Hugging Face's format"),
        ((".", *NOWHERE), "--url: means a running swarm; allowed: it or --checkpoint-path"),
        ((".", "--model", "m"), "--model: means a running swarm"),
        (("demo://counting", "--spans", "9"), "spec.spans.count: "),
        (("demo://counting", "--tokenizer-name", "absent/folder/x"), "--tokenizer-name: absent"),
    ],
)
def test_checkpoint_that_cannot_run_is_refused_before_a_start(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "a", "--checkpoint-path", *flags]) == 2

    told = capsys.readouterr().err
    assert sentence in told and len(told.splitlines()) == 1
