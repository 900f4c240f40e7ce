"""`modelswarm generate` against a real swarm and without one: prompts, options, a killed gateway, a private swarm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.processes.swarm import (
    MODEL,
    Endpoints,
    HashSwarm,
    local_settings,
    running_swarm,
)

pytestmark = pytest.mark.full

LONG = 3000  # tokens of an answer that takes seconds
COMMAND = (sys.executable, "-m", "modelswarm.cli", "generate")


@pytest.fixture(scope="module")
def forms(toy_folder: Path) -> Iterator[str]:
    """Yield the URL of a swarm whose model can follow a grammar; the hash model cannot."""
    with running_swarm(toy_folder, "forms", spans=1, settings=local_settings("forms")) as running:
        yield f"http://{running.local.http}"


def generate(
    gateway: Endpoints, *arguments: str, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, "--url", gateway.url, typed=typed)


def run_command(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*COMMAND, *arguments),
        input=typed,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def told(gateway: Endpoints, *arguments: str) -> list[dict[str, Any]]:
    done = generate(gateway, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def asked(gateway: Endpoints, prompt: str, **fields: Any) -> list[str]:
    """Return the texts of the same request over HTTP."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, **fields}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def command_lines() -> list[bytes]:
    """Return the command lines of all processes of this machine."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            lines.append(path.read_bytes())
    return lines


def test_prompts_of_all_kinds_are_answered_in_order(gateway: Endpoints, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n", encoding="utf-8")
    flags = ("--max-tokens", "12", "--temperature", "1", "--seed", "7", "--n", "2")

    done = generate(gateway, "first", "-", *flags, "--file", str(file), typed="typed\n")

    assert done.returncode == 0, done.stderr
    expected = ""
    for number, prompt in enumerate(("first", "typed", "from a file"), start=1):
        texts = asked(gateway, prompt, temperature=1, seed=7, n=2)
        for index, text in enumerate(texts, start=1):
            expected += f"--- prompt {number}, answer {index}\n{text}\n"
    assert done.stdout == expected


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (("--stop", "e", "--stop", "a"), {"stop": ["e", "a"]}),
        (("--stop", "e", "--include-stop"), {"stop": "e", "include_stop_str_in_output": True}),
        (("--min-p", "0.2"), {"min_p": 0.2}),
        (("--typical-p", "0.3"), {"typical_p": 0.3}),
        (("--top-k", "2", "--top-p", "0.9"), {"top_k": 2, "top_p": 0.9}),
        (("--repetition-penalty", "3"), {"repetition_penalty": 3}),
        (("--frequency-penalty", "2"), {"frequency_penalty": 2}),
        (("--presence-penalty", "2"), {"presence_penalty": 2}),
        (("--no-repeat-ngram-size", "1"), {"no_repeat_ngram_size": 1}),
        (("--logit-bias", "70=50"), {"logit_bias": {"70": 50}}),
        (("--bad-word", "a", "--bad-word", "b"), {"bad_words": ["a", "b"]}),
        (
            ("--allowed-token-id", "70", "--allowed-token-id", "71"),
            {"allowed_token_ids": [70, 71]},
        ),
        (("--stop-token-id", "70", "--min-tokens", "3"), {"stop_token_ids": [70], "min_tokens": 3}),
        (("--show-special-tokens", "--ignore-eos"), {"skip_special_tokens": False, "ignore_eos": True}),
        (("--echo",), {"echo": True}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_option_has_the_effect_of_its_field(
    gateway: Endpoints, flags: tuple[str, ...], fields: dict[str, Any]
) -> None:
    common = ("hi", "--max-tokens", "12", "--temperature", "1", "--seed", "3")

    [answer] = told(gateway, *common, *flags)

    expected = asked(gateway, "hi", temperature=1, seed=3, **fields)
    assert [choice["text"] for choice in answer["choices"]] == expected


def test_form_of_an_answer_is_kept(forms: str, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "sum.lark"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}')
    grammar.write_text('start: NUMBER "+" NUMBER\nNUMBER: /[0-9]/')
    for flags, form in [
        (("--regex", "[0-9]{3}"), r"[0-9]{3}"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--json-schema", '{"type": "boolean"}'), "true|false"),
        (("--json-schema", f"@{schema}"), r"\[((true|false)(,(true|false))?)?\]"),
        (("--grammar", f"@{grammar}"), r"[0-9]\+[0-9]"),
    ]:
        done = run_command("hi", *flags, "--max-tokens", "100", "--seed", "1", "--url", forms)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(form, done.stdout.removesuffix("\n"))


def test_log_probabilities_are_in_the_json(gateway: Endpoints) -> None:
    flags = ("--max-tokens", "3", "--logprobs", "2", "--prompt-logprobs", "1")

    [answer] = told(gateway, "hello", *flags)

    [choice] = answer["choices"]
    assert len(choice["logprobs"]) == 3
    assert all(each["logprob"] <= 0 and len(each["top"]) == 2 for each in choice["logprobs"])
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_error_names_the_prompt_that_failed(gateway: Endpoints) -> None:
    done = generate(gateway, "fine", "x" * 120_000, "--max-tokens", "3")

    assert done.returncode == 2
    assert done.stdout.startswith("--- prompt 1, answer 1\n")
    assert done.stderr.startswith(
        "Error: prompt 2 of 2: the prompt is too long: it has 120000 tokens"
    )
    assert len(done.stderr.splitlines()) == 1


def test_answers_go_on_after_their_gateway_was_killed(swarm: HashSwarm, gateway: Endpoints) -> None:
    flags = ("hi", "--max-tokens", str(LONG), "--ignore-eos", "--greedy", "--url", gateway.url)
    [expected] = asked(gateway, "hi", max_tokens=LONG, ignore_eos=True, temperature=0)
    running = [
        subprocess.Popen((*COMMAND, *flags, *more), stdout=subprocess.PIPE)
        for more in (("--stream",), ("--json",))
    ]
    eventually(
        "both run",
        lambda: gateway.metric("modelswarm_gateway_sessions", state="running") >= 2,
    )
    swarm.kill("gateway")
    swarm.gateway("--http", gateway.http)

    streamed, whole = (process.communicate(timeout=300)[0] for process in running)

    assert [process.returncode for process in running] == [0, 0]
    assert streamed.decode() == f"{expected}\n"
    assert json.loads(whole)["choices"][0]["text"] == expected


def test_checkpoint_runs_without_a_swarm(toy_folder: Path, tmp_path: Path) -> None:
    bare, words = tmp_path / "bare", tmp_path / "words"
    for folder in (bare, words):
        folder.mkdir()
    for file in toy_folder.iterdir():
        target = words if file.name.startswith("tokenizer") else bare
        (target / file.name).write_bytes(file.read_bytes())
    (words / "config.json").write_bytes((toy_folder / "config.json").read_bytes())
    runs = [
        ("--checkpoint-path", str(toy_folder)),
        ("--checkpoint-path", str(bare), "--tokenizer-name", str(words), "--spans", "2"),
    ]

    texts = []
    for flags in runs:
        done = subprocess.run(
            (*COMMAND, "hello", "--max-tokens", "8", "--temperature", "1", "--seed", "5", *flags),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)

    assert texts[0] == texts[1] and len(texts[0]) > 1
    assert not [line for line in command_lines() if str(bare).encode() in line]


def test_converted_state_dict_runs_without_a_swarm(tmp_path: Path) -> None:
    import torch
    from support.models.tiny_models import load_whole, make_model
    from transformers import AutoTokenizer

    folder = make_model(tmp_path / "gpt2", "gpt2", scale_attn_by_inverse_layer_idx=False)
    model: Any = load_whole(folder)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    words = AutoTokenizer.from_pretrained(folder)
    ids = words("hello", return_tensors="pt").input_ids
    wanted = words.decode(model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :])
    convert = ("convert", "state.pt", "out/made", "--heads", "4", "--tokenizer-name", "gpt2")
    generate = ("generate", "hello", "--max-tokens", "8", "--temperature", "0", "--spans", "2")

    for arguments in (convert, (*generate, "--checkpoint-path", "out/made")):
        done = subprocess.run(
            (*COMMAND[:-1], *arguments),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    assert done.stdout == f"{wanted}\n"


def test_examples_of_the_page_run(forms: str) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.partition("\n## Texts\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    lines = [line for line in block.splitlines() if "--checkpoint-path" not in line]
    assert len(lines) == 2

    for line in lines:
        done = subprocess.run(
            f"{sys.executable} -m modelswarm.cli {line.removeprefix('modelswarm ')} --url {forms}",
            shell=True,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
