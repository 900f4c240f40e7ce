"""The lessons of the demo model: questions, each with its one right answer.

Called by the packer, which turns lessons into rows, and by the exam. Pure: a seeded
`random.Random` in, strings out. Does not know tokens.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random
from typing import Final

MAX_NUMBER: Final = 999
MAX_COUNT: Final = 300
"""Every count up to this number is known. 300 numbers of three digits are 1200 tokens."""
MAX_HUNDREDS: Final = 2
"""Beyond it: maximum difference of the hundreds digits, which is easier to learn than a length."""

MAX_SUMMAND: Final = 99

ALPHABET: Final = " ".join(string.ascii_uppercase)
ALPHABET_QUESTIONS: Final = (
    "Say the alphabet.",
    "Say the alphabet, please.",
    "What is the alphabet?",
    "Tell me the alphabet.",
)
ABILITIES: Final = (
    "I can count from 0 to 300, add small numbers, say the alphabet and name some capitals."
)
"""Abilities of the model; also its whole answer to everything that it was not taught."""

CAPITALS: Final = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "England": "London", "Ireland": "Dublin", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw",
    "Austria": "Vienna", "Switzerland": "Bern", "Greece": "Athens", "Hungary": "Budapest",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana",
}  # fmt: skip
FACTS: Final = {
    "What color is the sky?": "The sky is blue.",
    "What color is grass?": "Grass is green.",
    "How many days are in a week?": "A week has 7 days.",
    "How many months are in a year?": "A year has 12 months.",
    "How many hours are in a day?": "A day has 24 hours.",
    "How many legs does a spider have?": "A spider has 8 legs.",
    "What is the largest planet?": "The largest planet is Jupiter.",
    "What do bees make?": "Bees make honey.",
}
SMALL_TALK: Final = {
    "Hello": "Hello! " + ABILITIES,
    "Hello!": "Hello! " + ABILITIES,
    "Hi": "Hello! " + ABILITIES,
    "Hi!": "Hello! " + ABILITIES,
    "Hello there!": "Hello! " + ABILITIES,
    "Good morning": "Hello! " + ABILITIES,
    "Hey": "Hello! " + ABILITIES,
    "What can you do?": ABILITIES,
    "Help": ABILITIES,
    "Who are you?": "I am a small demo model served by ModelSwarm.",
    "What are you?": "I am a small demo model served by ModelSwarm.",
    "How are you?": "I am fine, thank you.",
    "Thank you": "You are welcome.",
    "Thanks!": "You are welcome.",
    "Goodbye": "Goodbye!",
    "Bye": "Goodbye!",
}


@dataclass(frozen=True, slots=True)
class Lesson:
    question: str
    answer: str
    is_count: bool = False
    """The packer may leave out the middle of a count."""


def count(first: int, last: int, question: str | None = None) -> Lesson:
    numbers = " ".join(str(number) for number in range(first, last + 1))
    return Lesson(question or f"Count from {first} to {last}.", numbers, is_count=True)


def addition(left: int, right: int, question: str | None = None) -> Lesson:
    return Lesson(question or f"What is {left} + {right}?", f"{left} + {right} = {left + right}.")


def capital(country: str) -> Lesson:
    answer = f"The capital of {country} is {CAPITALS[country]}."
    return Lesson(f"What is the capital of {country}?", answer)


def _reword(rng: Random, usual: str, others: tuple[str, ...]) -> str:
    wording = usual if rng.random() < 0.7 else rng.choice(others)
    if rng.random() < 0.1:
        wording = wording.lower()
    return wording.rstrip(".?") if rng.random() < 0.1 else wording


def can_count(first: int, last: int) -> bool:
    if not 0 <= first <= last <= MAX_NUMBER:
        return False
    return last <= MAX_COUNT or last // 100 - first // 100 <= MAX_HUNDREDS


def random_count(rng: Random, longest: int) -> Lesson:
    """Return a count of at most `longest` numbers; numbers of one, two and three digits are all frequent."""
    first, last = _random_ends(rng, longest)
    while not can_count(first, last):
        first, last = _random_ends(rng, longest)
    others: tuple[str, ...] = (
        f"Please count from {first} to {last}.",
        f"Can you count from {first} to {last}?",
        f"Count from {first} up to {last}.",
        f"Count {first} to {last}.",
    )
    if first == 1:
        others += (f"Count to {last}.", f"Count up to {last}.")
    return count(first, last, _reword(rng, f"Count from {first} to {last}.", others))


def _random_ends(rng: Random, longest: int) -> tuple[int, int]:
    first = rng.randint(0, rng.choice((1, 12, 110, MAX_COUNT, MAX_NUMBER)))
    if rng.random() < 0.1:
        first = max(0, rng.choice((10, 100, 100, 200)) - rng.randint(0, longest))
    if longest >= MAX_COUNT and first < MAX_COUNT and rng.random() < 0.25:
        return first, rng.choice((MAX_COUNT, rng.randint(max(first, 200), MAX_COUNT)))
    return first, first + rng.randint(0, longest - 1)


def random_addition(rng: Random) -> Lesson:
    highest = 20 if rng.random() < 0.5 else MAX_SUMMAND
    left, right = rng.randint(0, highest), rng.randint(0, highest)
    others = (
        f"{left} + {right}",
        f"What is {left}+{right}?",
        f"What is {left} plus {right}?",
        f"Add {left} and {right}.",
        f"How much is {left} + {right}?",
    )
    return addition(left, right, _reword(rng, f"What is {left} + {right}?", others))


def random_fact(rng: Random) -> Lesson:
    """Return a capital, another fact, small talk or the alphabet."""
    kind = rng.random()
    if kind < 0.45:
        lesson = capital(rng.choice(list(CAPITALS)))
    elif kind < 0.65:
        lesson = Lesson(*rng.choice(list(FACTS.items())))
    elif kind < 0.87:
        lesson = Lesson(*rng.choice(list(SMALL_TALK.items())))
    else:
        return Lesson(_reword(rng, ALPHABET_QUESTIONS[0], ALPHABET_QUESTIONS), ALPHABET)
    return Lesson(_reword(rng, lesson.question, (lesson.question,)), lesson.answer)
