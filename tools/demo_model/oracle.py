"""The right answer to any question: the demo model's lessons as a total function.

Called by the generator of refusals, which changes known questions at random, and by the exam. Pure.
"""

from __future__ import annotations

import re
from typing import Final

from tools.demo_model.lessons import (
    ABILITIES,
    ALPHABET,
    ALPHABET_QUESTIONS,
    CAPITALS,
    FACTS,
    MAX_NUMBER,
    MAX_SUMMAND,
    SMALL_TALK,
    Lesson,
    addition,
    can_count,
    capital,
    count,
)

COUNT: Final = re.compile(r"(?:please |can you )?count (?:(?:from )?([0-9]+) )?(?:up )?to ([0-9]+)")
SUM: Final = re.compile(
    r"(?:(?:what is |how much is )?([0-9]+) ?\+ ?([0-9]+)|what is ([0-9]+) plus ([0-9]+)"
    r"|add ([0-9]+) and ([0-9]+))"
)


def normalize(question: str) -> str:
    return question.strip(" .?!").lower()


def _known_sentences() -> dict[str, str]:
    lessons = [capital(country) for country in CAPITALS]
    known = {lesson.question: lesson.answer for lesson in lessons} | FACTS | SMALL_TALK
    known |= dict.fromkeys(ALPHABET_QUESTIONS, ALPHABET)
    return {normalize(question): answer for question, answer in known.items()}


KNOWN_SENTENCES: Final = _known_sentences()


def known_answer(question: str) -> str | None:
    """Return the answer that the lessons teach, or None beyond their range."""
    asked = normalize(question)
    if asked in KNOWN_SENTENCES:
        return KNOWN_SENTENCES[asked]
    if found := COUNT.fullmatch(asked):
        return _known_count(found[1] or "1", found[2])
    if found := SUM.fullmatch(asked):
        left, right = (number for number in found.groups() if number is not None)
        return _known_sum(left, right)
    return None


def solve(question: str) -> Lesson:
    """Return the lesson of any question. Beyond the lessons' range its answer is the refusal."""
    answer = known_answer(question)
    if answer is None:
        return Lesson(question, ABILITIES)
    return Lesson(question, answer, is_count=COUNT.fullmatch(normalize(question)) is not None)


def _is_plain(number: str, highest: int) -> bool:
    return len(number) <= 3 and number == str(int(number)) and int(number) <= highest


def _known_count(first: str, last: str) -> str | None:
    if not (_is_plain(first, MAX_NUMBER) and _is_plain(last, MAX_NUMBER)):
        return None
    return count(int(first), int(last)).answer if can_count(int(first), int(last)) else None


def _known_sum(left: str, right: str) -> str | None:
    if not (_is_plain(left, MAX_SUMMAND) and _is_plain(right, MAX_SUMMAND)):
        return None
    return addition(int(left), int(right)).answer
