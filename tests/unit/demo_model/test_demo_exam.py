"""The shipped demo model passes its exam: a fixed sample in the fast tier, all questions in the full tier."""

from collections.abc import Iterator
from random import Random

import pytest
import torch
from transformers import LlamaForCausalLM

from modelswarm.demo import counting_folder
from tools.demo_model import unseen
from tools.demo_model.exam import answer_of, format_mark, grade, prompt_of
from tools.demo_model.lessons import ABILITIES, Lesson, count
from tools.demo_model.oracle import solve
from tools.demo_model.questions import Question, all_questions, ask, near_questions, refuse

PER_SUBJECT = 4
"""Hand-written questions taken from each list. The sample takes a few CPU seconds."""
SAMPLE = (
    "Count from 1 to 401.", "Count from 3 to 403.", "Count from 1 to 900.", "Count from 20 to 1.", "héllo 🌍 日本", "",
    *(text for texts in (unseen.CHATTER, unseen.SCRIPTS, unseen.SUMS, unseen.EMPTYISH) for text in texts[:PER_SUBJECT]),
    *(f"What is the capital of {place}?" for place in unseen.PLACES[:PER_SUBJECT]),
    "a" * 1500, "Lorem ipsum dolor sit amet. " * 40, "\n" * 300, "日本" * 200,
)  # fmt: skip

FLAWLESS = (
    "count: named", "count: to 300", "count: short", "facts", "beyond: scripts", "beyond: almost empty",
    "beyond: noise", "beyond: prose", "beyond: long", "beyond: boundary", "beyond: backwards", "chat", "plain",
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LlamaForCausalLM.from_pretrained(counting_folder(), dtype=torch.float32)
    torch.set_num_threads(before)


def wrong(model: LlamaForCausalLM, questions: list[Question]) -> list[str]:
    marks = grade(model, questions)
    assert sum(mark.asked for mark in marks.values()) == len(questions)
    return [
        f"{question.subject}: after {len(question.earlier)} turns {question.text[:80]!r}"
        for mark in marks.values()
        for question in mark.wrong
    ]


def test_unknown_questions_get_the_refusal(model: LlamaForCausalLM) -> None:
    assert wrong(model, [refuse("beyond", text) for text in SAMPLE]) == []


def test_generated_refusal_is_the_sentence(model: LlamaForCausalLM) -> None:
    refused = refuse("beyond", "Count from 1 to 401.", count(1, 5))
    assert answer_of(model, prompt_of(refused)) == ABILITIES
    assert answer_of(model, prompt_of(ask("known", count(7, 12)))) == "7 8 9 10 11 12"


def test_questions_near_lessons_get_no_other_answer(model: LlamaForCausalLM) -> None:
    assert wrong(model, list(near_questions())[::PER_SUBJECT]) == []


def test_eight_turns_with_refusals_are_right(model: LlamaForCausalLM) -> None:
    texts = (
        "Count from 1 to 20.", "Count from 1 to 401.", "What is 2 + 2?", "héllo 🌍 日本", "Count from 98 to 103.",
        "Tell me a joke.", "Say the alphabet.", "Count from 1 to 200.",
    )  # fmt: skip
    assert wrong(model, [ask("chat", *(solve(text) for text in texts))]) == []


@pytest.mark.full
@pytest.mark.timeout(3600)  # 40 s of processor time, at low priority beside everything else
def test_whole_exam_has_at_most_one_percent_wrong(model: LlamaForCausalLM) -> None:
    """Texts with typing errors and rare sums may be wrong; foreign, long, empty and plain texts and chats may not."""
    marks = grade(model, all_questions(Random(7)))
    failed = [format_mark(subject, mark) for subject, mark in marks.items() if mark.wrong]
    assert sum(mark.asked for mark in marks.values()) > 1200
    assert sum(len(mark.wrong) for mark in marks.values()) <= 12, failed
    assert [
        mark for subject, mark in marks.items() if subject.startswith(FLAWLESS) and mark.wrong
    ] == []


def test_grade_finds_a_wrong_answer(model: LlamaForCausalLM) -> None:
    false = Question("sums", "What is 2 + 2?", ("2 + 2 = 5.",))
    either = Question("sums", "What is 2 + 2?", ("2 + 2 = 5.", "2 + 2 = 4."))
    late = Question("sums", "What is 2 + 2?", ("2 + 2 = 4.",), (solve("Hello"),))
    unsaid = Question("sums", "What is 2 + 2?", ("2 + 2 = 4.",), (Lesson("Hello", "Goodbye!"),))
    assert grade(model, [false, either, late, unsaid])["sums"].wrong == [false, unsaid]
