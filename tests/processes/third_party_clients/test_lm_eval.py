"""lm-evaluation-harness against a real swarm of the counting model: its log-likelihoods equal those of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.programs.client_environment import ClientEnvironment
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running, running_swarm

pytestmark = pytest.mark.full

PACKAGES = ("lm-eval[api]==0.4.13", "transformers==5.24.0")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "clients.md"
COUNTING = Path(__file__).parents[3] / "modelswarm" / "demo" / "counting"
TASK = """
task: counting_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
QUESTIONS: list[dict[str, Any]] = [
    {"question": "one two three", "choices": ["four", "nine", "two"], "label": 0},
    {"question": "Count to 5: 1 2 3", "choices": ["4", "7 8"], "label": 0},
    {"question": "seven eight", "choices": ["nine ten", "one"], "label": 0},
]
# Largest difference of a log-likelihood, of some tokens, in float32 of two implementations.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_swarm(COUNTING, "counting", spans=2, replicas=1) as made:
        yield made


def test_log_likelihoods_equal_the_whole_model(running: Running, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(each) for each in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(lines, encoding="utf-8")
    text = TASK.format(file=tmp_path / "questions.jsonl")
    (tmp_path / "counting_choices.yaml").write_text(text, encoding="utf-8")
    samples = evaluate(running, tmp_path)
    assert len(samples) == len(QUESTIONS)
    expected = [
        [log_likelihood(each["question"], f" {choice}") for choice in each["choices"]]
        for each in QUESTIONS
    ]
    found = {sample["doc_id"]: sample["filtered_resps"] for sample in samples}
    for place, wanted in enumerate(expected):
        got = [float(score) for score, _ in found[place]]
        assert got == pytest.approx(wanted, abs=TOLERANCE)


def evaluate(running: Running, folder: Path) -> list[dict[str, Any]]:
    """Run the harness on the task of this folder; return its samples."""
    (example,) = re.findall(r"--model_args \\\n  (\S+)", PAGE.read_text("utf-8"))
    arguments = example.replace("http://127.0.0.1:8000", f"http://{running.local.http}")
    arguments = arguments.replace("TOKENIZER", str(COUNTING)).replace("MODEL", TOY_MODEL)
    words = ["--model", "local-completions", "--model_args", arguments]
    words += ["--tasks", "counting_choices", "--include_path", str(folder)]
    words += ["--log_samples", "--output_path", str(folder / "results")]
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "none"}
    ClientEnvironment(PACKAGES).run("-m", "lm_eval", *words, env=env)
    (file,) = folder.glob("results/**/samples_counting_choices_*.jsonl")
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def log_likelihood(context: str, continuation: str) -> float:
    """Return the whole model's log probability of the continuation, by transformers."""
    import torch
    from support.models.tiny_models import load_whole
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(COUNTING)
    begin, whole = (
        tokenizer(text, add_special_tokens=False).input_ids
        for text in (context, context + continuation)
    )
    with torch.no_grad():
        logits = load_whole(COUNTING)(torch.tensor([whole])).logits[0]
    scores = torch.log_softmax(logits.float(), -1)
    places = range(len(begin), len(whole))
    return float(sum(scores[place - 1, whole[place]] for place in places))
