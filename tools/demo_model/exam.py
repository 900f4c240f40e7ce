"""Examines the demo model: whole answers, token for token, and the margin of each right token.

Greedy decoding gives exactly the answer if, and only if, every token of the answer is the most
likely one after the right prefix. So one forward pass examines a whole chat. Used by the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import torch
from transformers import LlamaForCausalLM

from tools.demo_model.lessons import (
    ALPHABET,
    CAPITALS,
    FACTS,
    SMALL_TALK,
    Lesson,
    addition,
    capital,
    count,
)
from tools.demo_model.packing import IGNORED, Chat
from tools.demo_model.text import BEGIN

Marks = dict[str, tuple[int, int, float]]
"""Per subject: fully right chats, all chats, the smallest margin of a right token (in logits)."""


@dataclass(frozen=True, slots=True)
class Question:
    subject: str
    chat: Chat


def make_chat(lessons: Iterable[Lesson]) -> Chat:
    chat = Chat()
    chat.write([BEGIN], learned=False)
    for lesson in lessons:
        chat.write_turn(lesson)
    return chat


def _counting_questions(rng: Random, number: int) -> Iterable[tuple[str, list[Lesson]]]:
    yield "1..200", [count(1, 200)]
    yield "57..250", [count(57, 250)]
    yield "1..300", [count(1, 300)]
    for _ in range(number):
        first = rng.randint(0, 290)
        yield "to 300", [count(first, rng.randint(first, 300))]
        first = rng.randint(290, 990)
        yield "to 999", [count(first, min(999, first + rng.randint(0, 250)))]
        first = rng.randint(0, 800)
        yield "short", [count(first, first + rng.randint(0, 9))]


def _other_questions(rng: Random) -> Iterable[tuple[str, list[Lesson]]]:
    for left in range(21):
        yield "sums", [addition(left, right) for right in range(21)]
        yield "first sum", [addition(left, rng.randint(0, 20))]
    for country in CAPITALS:
        yield "facts", [capital(country)]
    for question, answer in {**FACTS, **SMALL_TALK, "Say the alphabet.": ALPHABET}.items():
        yield "facts", [Lesson(question, answer)]
    talk = [count(1, 20), addition(2, 2), count(5, 9), capital("France"), count(1, 200)]
    yield "chat", talk
    yield (
        "chat",
        [count(1, 200), addition(7, 5), count(57, 250), Lesson("Say the alphabet.", ALPHABET)],
    )
    for _ in range(10):
        first = rng.randint(0, 250)
        yield "chat", [count(first, first + rng.randint(0, 40)), *rng.sample(talk, 5)]


class Exam:
    def __init__(self, rng: Random, number: int = 12) -> None:
        asked = [*_counting_questions(rng, number), *_other_questions(rng)]
        self.questions = [Question(subject, make_chat(lessons)) for subject, lessons in asked]

    def grade(self, model: LlamaForCausalLM) -> Marks:
        marks: Marks = {}
        for question in self.questions:
            lead = smallest_margin(model, question.chat)
            right, asked, least = marks.get(question.subject, (0, 0, float("inf")))
            marks[question.subject] = (right + (lead > 0), asked + 1, min(least, lead))
        return marks


@torch.no_grad()
def smallest_margin(model: LlamaForCausalLM, chat: Chat) -> float:
    """Return the smallest (logit of the right token - best other logit); < 0: a wrong token."""
    logits = model(input_ids=torch.tensor([chat.ids]), use_cache=False).logits[0, :-1].float()
    targets = torch.tensor(chat.targets[1:])
    logits, targets = logits[targets != IGNORED], targets[targets != IGNORED]
    right = logits.gather(1, targets[:, None])[:, 0]
    others = logits.scatter(1, targets[:, None], float("-inf")).amax(1)
    return float((right - others).min())


def format_marks(marks: Marks) -> str:
    return "exam " + ", ".join(
        f"{subject} {right}/{asked} ({lead:+.1f})"
        for subject, (right, asked, lead) in marks.items()
    )
