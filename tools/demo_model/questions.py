"""The questions of the demo model's exam: its lessons, what is beyond them, and whole chats.

Called by the exam and by tests. Pure: a seeded `random.Random` in, questions out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from tools.demo_model import unseen
from tools.demo_model.lessons import (
    ABILITIES,
    ALPHABET,
    ALPHABET_QUESTIONS,
    CAPITALS,
    FACTS,
    MAX_SUMMAND,
    SMALL_TALK,
    Lesson,
    addition,
    can_count,
    capital,
    count,
)
from tools.demo_model.oracle import known_answer, solve
from tools.demo_model.refusals import random_refusal
from tools.demo_model.strange_text import random_foreign, random_noise

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
"""English prose that no training row contains."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question after `earlier` turns. Each of `answers` is right, and so must be the earlier ones."""

    subject: str
    text: str
    answers: tuple[str, ...]
    earlier: tuple[Lesson, ...] = ()
    is_plain_text: bool = False


def all_questions(rng: Random) -> Iterator[Question]:
    yield from counting_questions(rng)
    yield from fact_questions(rng)
    yield from refused_counts(rng)
    yield from refused_questions(rng)
    yield from refused_texts(rng)
    yield from near_questions()
    yield from chats(rng)
    yield from plain_texts(rng)


def ask(subject: str, *lessons: Lesson) -> Question:
    *earlier, last = lessons
    return Question(subject, last.question, (last.answer,), tuple(earlier))


def refuse(subject: str, text: str, *earlier: Lesson) -> Question:
    return Question(subject, text, (ABILITIES,), earlier)


def counting_questions(rng: Random) -> Iterator[Question]:
    for first, last in ((1, 200), (57, 250), (1, 300), (0, 300), (98, 103), (7, 7), (1, 20)):
        yield ask("count: named", count(first, last))
    for _ in range(40):
        first = rng.randint(0, 290)
        yield ask("count: to 300", count(first, rng.randint(first, 300)))
        yield ask("count: to 999", _random_high_count(rng))
        first = rng.randint(0, 290)
        yield ask("count: short", count(first, first + rng.randint(0, 9)))


def _random_high_count(rng: Random) -> Lesson:
    while True:
        first = rng.randint(290, 990)
        last = min(999, first + rng.randint(0, 250))
        if can_count(first, last):
            return count(first, last)


def fact_questions(rng: Random) -> Iterator[Question]:
    for left in range(21):
        yield ask("sums", *(addition(left, right) for right in range(21)))
        yield ask("sums", addition(left, rng.randint(0, 20)))
    for _ in range(100):
        left, right = rng.randint(0, MAX_SUMMAND), rng.randint(0, MAX_SUMMAND)
        yield ask("sums to 99", addition(left, right))
    for country in CAPITALS:
        yield ask("facts", capital(country))
    alphabet = dict.fromkeys(ALPHABET_QUESTIONS, ALPHABET)
    for question, answer in {**FACTS, **SMALL_TALK, **alphabet}.items():
        yield ask("facts", Lesson(question, answer))


def refused_counts(rng: Random) -> Iterator[Question]:
    for text in unseen.COUNTS:
        yield refuse("beyond: named counts", text)
    for _ in range(100):
        first = rng.choice((1, rng.randint(0, 600)))
        highest = rng.choice((999, 1100, 9999))
        text = f"Count from {first} to {rng.randint(max(first, 100) + 300, highest)}."
        yield refuse("beyond: random counts", text)
        last = rng.randint(0, 300)
        text = f"Count from {last + rng.choice((1, 9, rng.randint(1, 300)))} to {last}."
        yield refuse("beyond: backwards", text)
    for first, last in ((1, 301), (1, 310), (0, 350), (5, 304), (99, 399), (1, 333), (250, 550)):
        yield refuse("beyond: boundary", f"Count from {first} to {last}.")


def refused_questions(rng: Random) -> Iterator[Question]:
    for text in unseen.SUMS:
        yield refuse("beyond: sums", text)
    for place in unseen.PLACES:
        yield refuse("beyond: capitals", f"What is the capital of {place}?")
    for text in unseen.CHATTER:
        yield refuse("beyond: chatter", text)
    for _ in range(100):
        lesson = random_refusal(rng, 60)
        yield Question("beyond: as trained", lesson.question, (lesson.answer,))


def refused_texts(rng: Random) -> Iterator[Question]:
    for text in unseen.SCRIPTS:
        yield refuse("beyond: scripts", text)
    for text in unseen.EMPTYISH:
        yield refuse("beyond: almost empty", text)
    for _ in range(50):
        yield refuse("beyond: noise", _unknown(rng))
    prose = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    for length in (30, 60, 100, 200, 400, 800, 1600, 3000):
        for _ in range(5):
            start = rng.randrange(len(prose) - length)
            yield refuse("beyond: prose", prose[start : start + length])
    for length in (300, 1000, 3000):
        for unit in (
            "a",
            "1",
            "ha ",
            "日本",
            "\n",
            "0 1 ",
            "Count from 1 to 10. ",
            "What is 2 + 2? ",
        ):
            text = (unit * length).encode()[:length].decode(errors="ignore")
            answers = (ABILITIES, known_answer(unit) or ABILITIES)  # once is a sensible answer, too
            yield Question("beyond: long", text, answers)


def _unknown(rng: Random) -> str:
    while True:
        text = (random_noise if rng.random() < 0.6 else random_foreign)(rng, 80)
        if known_answer(text) is None:
            return text


def near_questions() -> Iterator[Question]:
    for known, others in unseen.NEAR.items():
        for text in others:
            yield Question("near a lesson", text, (ABILITIES, solve(known).answer))


def chats(rng: Random) -> Iterator[Question]:
    """Chats of eight turns, each of which must be right, and chats that fill the context."""
    talk = [
        count(1, 20),
        addition(2, 2),
        count(5, 9),
        capital("France"),
        solve("Hello"),
        solve("Say the alphabet."),
    ]
    strange = [*unseen.CHATTER, *unseen.SCRIPTS, *unseen.COUNTS, *unseen.SUMS]
    for _ in range(12):
        first = rng.randint(0, 250)
        turns = [*talk, count(first, first + rng.randint(0, 40)), addition(7, rng.randint(0, 20))]
        yield ask("chat: eight lessons", *rng.sample(turns, 8))
    for _ in range(12):
        turns = [*rng.sample(talk, 4), *(solve(rng.choice(strange)) for _ in range(4))]
        yield ask("chat: with refusals", *rng.sample(turns, 8))
    for _ in range(6):
        turns = [count(1, rng.randint(100, 150)) for _ in range(4)]
        turns += [solve(rng.choice(strange)) for _ in range(4)]
        yield ask("chat: long", *rng.sample(turns, 8))
    yield ask("chat: full", *[count(1, 290)] * 4)
    yield ask("chat: full", *[count(1, 200)] * 5)
    yield ask("chat: full", *[count(1, 300)] * 4)
    yield ask("chat: full", *[count(57, 250)] * 5)
    yield ask(
        "chat: full", count(1, 290), solve("Count from 1 to 401."), count(1, 290), count(1, 290)
    )
    for _ in range(5):
        yield ask("chat: full", *(count(1, rng.randint(150, 300)) for _ in range(6)))


def plain_texts(rng: Random) -> Iterator[Question]:
    """Completions: a plain count goes on, and other text is followed by the refusal."""
    for first in (5, 57, 97, 196, 296, rng.randint(100, 800)):
        text = " ".join(str(number) for number in range(first, first + 3))
        answer = "".join(f" {number}" for number in range(first + 3, first + 40))
        yield Question("plain: counts", text, (answer,), is_plain_text=True)
    for text in (
        "Hello",
        "Once upon a time",
        "The meaning of life is",
        "héllo 🌍 日本",
        "def main():",
    ):
        answers = tuple(before + ABILITIES for before in ("\n", " ", ""))
        yield Question("plain: text", text, answers, is_plain_text=True)
