"""Training rows: chats packed into ids, targets and positions.

Long counts are cheap to learn: the middle of a count is left out, and the positions continue as if
it were there. So a row of 256 tokens shows the model an end number 2000 positions back.
Called by the trainer and by the exam. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Final

from tools.demo_model.lessons import (
    MAX_COUNT_LENGTH,
    MAX_NUMBER,
    Lesson,
    count,
    random_addition,
    random_count,
    random_fact,
)
from tools.demo_model.text import ASSISTANT, BEGIN, CONTEXT, END, USER, encode

IGNORED: Final = -100
AMBIGUOUS_DISTANCES: Final = (
    11,
    21,
    31,
    41,
    51,
    81,
    91,
    101,
    101,
    101,
    111,
    151,
    201,
    201,
    201,
    251,
)
"""At these distances before the end, digits of the end number repeat: a count must not stop there."""


@dataclass(slots=True)
class Chat:
    """One row being written. `targets[i]` is the id at `i` if it is learned, else IGNORED."""

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    next_position: int = 0

    def write(self, ids: list[int], learned: bool) -> None:
        self.ids += ids
        self.targets += ids if learned else [IGNORED] * len(ids)
        self.positions += range(self.next_position, self.next_position + len(ids))
        self.next_position += len(ids)

    def write_question(self, question: str) -> None:
        self.write([USER, *encode(question), END, ASSISTANT], learned=False)

    def write_turn(self, lesson: Lesson) -> None:
        self.write_question(lesson.question)
        self.write([*encode(lesson.answer), END], learned=True)

    def skip_positions(self, tokens: int) -> None:
        self.next_position += tokens

    def write_shortened_count(self, lesson: Lesson, rng: Random) -> None:
        """Write a count without most of its middle: the start, often one piece in between, the end."""
        self.write_question(lesson.question)
        numbers = lesson.answer.split()
        pieces = [(0, rng.randint(1, 8))]
        if rng.random() < 0.6:
            middle = len(numbers) - rng.choice((rng.randint(0, len(numbers)), *AMBIGUOUS_DISTANCES))
            pieces.append((middle - rng.randint(1, 4), middle + rng.randint(1, 6)))
        pieces.append((len(numbers) - rng.randint(2, 12), len(numbers)))
        done = 0
        for start, stop in pieces:
            if start < done or start >= stop or stop > len(numbers):
                continue
            self._write_piece(numbers, done, start, stop)
            done = stop
        self.write([END], learned=done == len(numbers))

    def _write_piece(self, numbers: list[str], done: int, start: int, stop: int) -> None:
        """Write numbers [start, stop) after skipping [done, start); the first one is then not learned."""
        self.skip_positions(sum(len(number) + 1 for number in numbers[done:start]))
        for place in range(start, stop):
            text = numbers[place] if place == 0 else " " + numbers[place]
            self.write(encode(text), learned=place > start or start == done)


def random_lesson(rng: Random, longest: int) -> Lesson:
    kind = rng.random()
    if kind < 0.55:
        return random_count(rng, longest)
    return random_addition(rng) if kind < 0.8 else random_fact(rng)


def make_short_row(rng: Random, length: int) -> Chat:
    """Return a row of many short turns. Counts are short or shortened, so that a row has many decisions."""
    chat = Chat()
    if rng.random() < 0.03:
        return _make_bare_count(rng, length)
    chat.write([BEGIN], learned=False)
    while len(chat.ids) < length:
        lesson = random_lesson(
            rng, MAX_COUNT_LENGTH if rng.random() < 0.35 else rng.choice((4, 8, 16))
        )
        too_far = chat.next_position + len(lesson.answer) > CONTEXT - length
        if not lesson.is_count or lesson.answer.count(" ") < 16:
            chat.write_turn(lesson)
        elif not too_far:
            chat.write_shortened_count(lesson, rng)
    return chat


def make_long_row(rng: Random, length: int) -> Chat:
    """Return a row of whole counts, as at inference, with other turns around them."""
    chat = Chat()
    chat.write([BEGIN], learned=False)
    if rng.random() < 0.4:
        chat.write_turn(random_lesson(rng, 24))
    while len(chat.ids) < length:
        first = (
            1
            if rng.random() < 0.4
            else rng.randint(0, rng.choice((120, MAX_NUMBER - MAX_COUNT_LENGTH)))
        )
        room = (length - len(chat.ids)) // 4
        fitting = rng.randint(room // 2, room + 20) if rng.random() < 0.5 else rng.randint(10, 100)
        numbers = min(MAX_COUNT_LENGTH, max(2, fitting))
        chat.write_turn(count(first, min(MAX_NUMBER, first + numbers - 1)))
        for _ in range(rng.randint(0, 3)):
            chat.write_turn(random_lesson(rng, 24))
    return chat


def _make_bare_count(rng: Random, length: int) -> Chat:
    """Return a row without a chat: the plain prompt "5 6 7" continues with 8."""
    chat = Chat()
    if rng.random() < 0.5:
        chat.write([BEGIN], learned=False)
    first = rng.randint(0, rng.choice((10, MAX_COUNT_LENGTH, MAX_NUMBER - 100)))
    numbers = " ".join(str(number) for number in range(first, min(MAX_NUMBER, first + length) + 1))
    known = len(f"{first} {first + 1}")
    chat.write(encode(numbers[:known]), learned=False)
    chat.write(encode(numbers[known:])[:length], learned=True)
    chat.write([BEGIN] * max(0, length - len(chat.ids)), learned=False)
    return chat
