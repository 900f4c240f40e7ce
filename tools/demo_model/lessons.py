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
MAX_COUNT_LENGTH: Final = 300
"""Maximum numbers in one count: 300 numbers of three digits are 1200 tokens."""

ALPHABET: Final = " ".join(string.ascii_uppercase)
ABILITIES: Final = "I can count, add small numbers, say the alphabet and name some capitals."
FALLBACK: Final = "Sorry, I do not know that. " + ABILITIES

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
STRANGE_WORDS: Final = (
    "tell write explain me a the about story poem code in python how why when does is are you my "
    "love joke weather today summarize translate into french long short list of best movies "
    "music president who wrote book history war science cat dog name some please can think life "
    "meaning number recipe cake make fix this bug function what which where run cook swarm model "
    "GPU hello world test foo"
)


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


def random_count(rng: Random, longest: int) -> Lesson:
    """Return a count of at most `longest` numbers; numbers of one, two and three digits are all frequent."""
    first = rng.randint(0, rng.choice((1, 12, 110, MAX_COUNT_LENGTH, MAX_NUMBER)))
    if rng.random() < 0.1:
        first = max(0, rng.choice((10, 100, 100, 200)) - rng.randint(0, longest))
    last = min(MAX_NUMBER, first + rng.randint(0, longest - 1))
    others: tuple[str, ...] = (
        f"Please count from {first} to {last}.",
        f"Can you count from {first} to {last}?",
        f"Count from {first} up to {last}.",
        f"Count {first} to {last}.",
    )
    if first == 1:
        others += (f"Count to {last}.", f"Count up to {last}.")
    return count(first, last, _reword(rng, f"Count from {first} to {last}.", others))


def random_addition(rng: Random) -> Lesson:
    highest = 20 if rng.random() < 0.7 else 99
    left, right = rng.randint(0, highest), rng.randint(0, highest)
    others = (
        f"{left} + {right}",
        f"What is {left}+{right}?",
        f"What is {left} plus {right}?",
        f"Add {left} and {right}.",
        f"How much is {left} + {right}?",
    )
    return addition(left, right, _reword(rng, f"What is {left} + {right}?", others))


def _random_nonsense(rng: Random) -> Lesson:
    words = rng.choices(STRANGE_WORDS.split(), k=rng.randint(2, 9))
    question = " ".join(words) + rng.choice(("", ".", "?", "!"))
    return Lesson(question[0].upper() + question[1:], FALLBACK)


def _random_unknown_capital(rng: Random) -> Lesson:
    length = rng.randint(4, 9)
    place = "".join(rng.choices(string.ascii_lowercase, k=length)).capitalize()
    return Lesson(f"What is the capital of {place}?", FALLBACK)


def random_fact(rng: Random) -> Lesson:
    """Return a capital, another fact, small talk, the alphabet, or a question the model cannot answer."""
    kind = rng.random()
    if kind < 0.4:
        lesson = capital(rng.choice(list(CAPITALS)))
    elif kind < 0.55:
        lesson = Lesson(*rng.choice(list(FACTS.items())))
    elif kind < 0.72:
        return Lesson(*rng.choice(list(SMALL_TALK.items())))
    elif kind < 0.82:
        others = ("Say the alphabet, please.", "What is the alphabet?", "Tell me the alphabet.")
        return Lesson(_reword(rng, "Say the alphabet.", others), ALPHABET)
    elif kind < 0.87:
        return _random_unknown_capital(rng)
    else:
        return _random_nonsense(rng)
    return Lesson(_reword(rng, lesson.question, (lesson.question,)), lesson.answer)
