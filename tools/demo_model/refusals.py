"""Random questions beyond the lessons, each answered with the one sentence of refusal.

Called by the packer and by the exam. A changed lesson may still be a lesson: then `solve` gives its
own answer. Pure: a seeded `random.Random` in, lessons out.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from random import Random
from typing import Final

from tools.demo_model.lessons import (
    CAPITALS,
    MAX_COUNT,
    MAX_HUNDREDS,
    MAX_NUMBER,
    Lesson,
    random_addition,
    random_count,
    random_fact,
)
from tools.demo_model.oracle import solve
from tools.demo_model.strange_text import (
    EMPTYISH,
    random_foreign,
    random_noise,
    random_prose,
    random_sentence,
    random_word,
)

FAR_COUNTS: Final = 0.35  # of the refusals
PLACES: Final = (
    "Texas", "California", "Ohio", "Bavaria", "Scotland", "Wales", "Russia", "Turkey", "Australia", "Vietnam",
    "Thailand", "Nigeria", "Iran", "Iraq", "Israel", "Ukraine", "Belgium", "Serbia", "Croatia", "Bolivia", "Ecuador",
    "Panama", "Haiti", "Ghana", "Sudan", "Libya", "Nepal", "Mongolia", "Korea", "the world", "Europe", "Africa",
    "Asia", "Mars", "Florida", "Quebec", "Sicily", "Paris", "London", "Rome", "Tokyo", "France and Spain",
    "South Africa",
)  # fmt: skip
NUMBER_WORDS: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "twenty",
    "fifty", "a hundred", "one thousand", "infinity", "a million", "zehn", "cien",
)  # fmt: skip


def _random_range(rng: Random) -> tuple[int, int]:
    """Return the ends of a count that is too long, too high or backwards."""
    kind = rng.random()
    if kind < 0.15:
        return rng.randint(0, rng.choice((1, 9, 99))), rng.randint(MAX_COUNT + 1, 399)
    first = 1 if rng.random() < 0.3 else rng.randint(0, rng.choice((9, 99, 699)))
    if kind < 0.45:
        return first, rng.randint((first // 100 + MAX_HUNDREDS + 1) * 100, MAX_NUMBER)
    if kind < 0.62:
        start = rng.choice((first, rng.randint(700, 99999)))
        return start, rng.choice((1000, 1001, rng.randint(1000, 1400), rng.randint(1000, 999999)))
    last = rng.choice((0, 1, rng.randint(0, rng.choice((8, 20, 98, 300, 998)))))
    if rng.random() < 0.4:
        return last + rng.randint(1, 12), last
    return rng.randint(last + 1, max(last + 1, rng.choice((20, 100, 300, 999)))), last


def random_far_count(rng: Random) -> Lesson:
    """Return a count that is too long, too high or backwards, in one of the known wordings."""
    first, last = _random_range(rng)
    wordings = [
        f"Please count from {first} to {last}.",
        f"Can you count from {first} to {last}?",
        f"Count from {first} up to {last}.",
        f"Count {first} to {last}.",
    ]
    if rng.random() < 0.2:
        highest = rng.choice((rng.randint(301, 999), 1000, rng.randint(1000, 10**7)))
        wordings = [f"Count to {highest}.", f"Count up to {highest}."]
    question = f"Count from {first} to {last}." if rng.random() < 0.6 else rng.choice(wordings)
    if rng.random() < 0.1:
        question = question.lower()
    return solve(question.rstrip(".?") if rng.random() < 0.15 else question)


def random_pair(rng: Random) -> Lesson:
    """Return a count between two near numbers, as often backwards, which is refused, as upwards."""
    lower = rng.randint(0, rng.choice((9, 99, 99, 300, MAX_NUMBER - 20)))
    ends = [lower, lower + rng.choice((1, rng.randint(1, 12), rng.randint(1, 100)))]
    if rng.random() < 0.5:
        ends.reverse()
    wordings = (f"Count {ends[0]} to {ends[1]}.", f"Please count from {ends[0]} to {ends[1]}.")
    usual = f"Count from {ends[0]} to {ends[1]}."
    return solve(usual if rng.random() < 0.8 else rng.choice(wordings))


def _random_odd_count(rng: Random) -> str:
    first, last = rng.randint(0, 60), rng.randint(0, 300)
    one, other = rng.choice(NUMBER_WORDS), rng.choice(NUMBER_WORDS)
    wordings = (
        f"Count from -{first} to {last}.", f"Count from {first}.5 to {last}.", f"Count from 0{first} to {last}.",
        f"Count from {one} to {other}.", f"Count to {one}.", f"Count from {first} to {one}.",
        f"Count down from {last}.", f"Count backwards from {last}.", f"Count backwards from {last} to {first}.",
        f"Count from {last} down to {first}.", f"Count down from {last} to {first}.",
        f"Count from {first} to {last} by 2.", f"Count by {first} to {last}.", f"Count from {first} to 1,000.",
        f"Count from {first} to {last} in French.", f"Count from {first}", "Count.",
        f"Count from {first} to {last} and back.", "Count from 1 to", "Count", "Count from", f"Count {last}.",
        f"Count from {first} to {last} backwards.", f"Count the numbers from {first} to {last}.",
        f"{first} to {last}", f"Count from {first} to {last} twice.", f"Count from {first} until {last}.",
        f"{first}-{last}", "Keep counting.", f"Count every number from {first} to {last}.", "Count to infinity.",
        "Count for me.", "Go on.", "Continue.",
    )  # fmt: skip
    return rng.choice(wordings)


def _random_odd_sum(rng: Random) -> str:
    left, right = rng.randint(0, 99), rng.randint(0, rng.choice((9, 99, 999)))
    high, sign = rng.randint(100, 10 ** rng.randint(3, 6)), rng.choice("-*/^%x")
    wordings = (
        f"What is {high} + {right}?", f"What is {left} + {high}?", f"What is {left} {sign} {right}?",
        f"{left} {sign} {right}", f"What is {left}{sign}{right}?", f"What is {left} minus {right}?",
        f"What is {left} times {right}?", f"{left} +", f"What is {left} + {right} + {rng.randint(0, 20)}?",
        f"Add {high} and {right}.", f"What is -{left} + {right}?", f"What is {left}.5 + {right}?",
        f"What is the sum of {left} and {right}?", f"What is {rng.choice(NUMBER_WORDS)} + {left}?",
        f"{high} + {high}", f"What is the square root of {right}?", f"Subtract {left} from {right}.",
        f"What is {left}?", f"Multiply {left} by {right}.", f"Is {left} + {right} = {left + right}?",
        f"How much is {left}?", f"{high}+{right}", f"What is {left} + {rng.choice('abcdefghijklmnopqrstuvwyz')}?",
    )  # fmt: skip
    return rng.choice(wordings)


def _random_unknown_capital(rng: Random) -> str:
    place = rng.choice(PLACES)
    if rng.random() < 0.4:
        place = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10))).capitalize()
    elif rng.random() < 0.5:
        place = _change(rng, rng.choice(list(CAPITALS)))
    elif rng.random() < 0.3:
        place = random_word(rng).capitalize()
    return f"What is the capital of {place}?"


def _change(rng: Random, text: str) -> str:
    """Return the text with one character lost, doubled, swapped or replaced."""
    place = rng.randrange(len(text))
    before, sign, after = text[:place], text[place], text[place + 1 :]
    return rng.choice(
        (
            before + after,
            before + sign + sign + after,
            before + after[:1] + sign + after[1:],
            before + rng.choice(string.ascii_lowercase) + after,
        )
    )


def _random_known(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return random_count(rng, 20).question
    return (random_addition(rng) if kind < 0.4 else random_fact(rng)).question


def _random_near_miss(rng: Random) -> str:
    """Return a known question with a slip of the hand, another word, or more text around it."""
    known, kind = _random_known(rng), rng.randrange(7)
    parts = known.split()
    place = rng.randrange(len(parts))
    if kind == 0:
        return _change(rng, known)
    if kind <= 2:
        return " ".join([*parts[:place], random_word(rng), *parts[place + 1 :]])
    if kind == 3:
        return " ".join([*parts[:place], random_word(rng), *parts[place:]])
    if kind == 4:
        return " ".join([*parts[:place], *parts[place + 1 :]])
    if kind == 5:
        return " ".join(
            rng.sample([known, rng.choice((random_sentence(rng), _random_known(rng)))], 2)
        )
    return " ".join(parts[: place + 1])


def random_refusal(rng: Random, longest: int) -> Lesson:
    """Return a question that is most likely beyond the lessons, of at most about `longest` bytes."""
    if rng.random() < FAR_COUNTS:
        return random_far_count(rng)
    longest = rng.randint(1, longest)
    kinds: tuple[tuple[float, Callable[[], str]], ...] = (
        (0.06, lambda: _random_odd_count(rng)),
        (0.08, lambda: _random_odd_sum(rng)),
        (0.13, lambda: _random_unknown_capital(rng)),
        (0.15, lambda: _random_near_miss(rng)),
        (0.12, lambda: random_sentence(rng)),
        (0.03, lambda: random_prose(rng, longest)),
        (0.05, lambda: random_foreign(rng, longest)),
        (0.04, lambda: random_noise(rng, longest)),
        (0.02, lambda: rng.choice(EMPTYISH)),
    )
    (make,) = rng.choices([make for _, make in kinds], [share for share, _ in kinds])
    return solve(make())
