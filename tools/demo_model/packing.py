"""Rows to train on: chats packed into ids, targets and positions.

Called by the trainer and by the exam. The trick that makes long counts cheap to learn: the middle
of a count is left out while the positions go on as if it were there, so that a row of 256 tokens
shows the model an end number that lies 2000 positions back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Final

from tools.demo_model.lessons import (
    HIGHEST,
    LONGEST,
    Lesson,
    count,
    random_addition,
    random_count,
    random_fact,
)
from tools.demo_model.text import ASSISTANT, BEGIN, CONTEXT, END, USER, encode

IGNORED: Final = -100
LOOKALIKES: Final = (11, 21, 31, 41, 51, 81, 91, 101, 101, 101, 111, 151, 201, 201, 201, 251)
"""So many numbers before the end, digits of the end come back: where a count must not stop."""


@dataclass(slots=True)
class Chat:
    """One row being written. `targets[i]` is the id at `i` where it counts, else IGNORED."""

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    next_position: int = 0

    def write(self, ids: list[int], learned: bool) -> None:
        self.ids += ids
        self.targets += ids if learned else [IGNORED] * len(ids)
        self.positions += range(self.next_position, self.next_position + len(ids))
        self.next_position += len(ids)

    def ask(self, question: str) -> None:
        self.write([USER, *encode(question), END, ASSISTANT], learned=False)

    def turn(self, lesson: Lesson) -> None:
        self.ask(lesson.question)
        self.write([*encode(lesson.answer), END], learned=True)

    def skip(self, tokens: int) -> None:
        self.next_position += tokens

    def cut_count(self, lesson: Lesson, rng: Random) -> None:
        """A count with its middle left out: its start, often a piece on the way, its end."""
        self.ask(lesson.question)
        numbers = lesson.answer.split()
        pieces = [(0, rng.randint(1, 8))]
        if rng.random() < 0.6:
            middle = len(numbers) - rng.choice((rng.randint(0, len(numbers)), *LOOKALIKES))
            pieces.append((middle - rng.randint(1, 4), middle + rng.randint(1, 6)))
        pieces.append((len(numbers) - rng.randint(2, 12), len(numbers)))
        done = 0
        for start, stop in pieces:
            if start < done or start >= stop or stop > len(numbers):
                continue
            self._piece(numbers, done, start, stop)
            done = stop
        self.write([END], learned=done == len(numbers))

    def _piece(self, numbers: list[str], done: int, start: int, stop: int) -> None:
        """Numbers [start, stop) after a jump over [done, start); the landing is not learned."""
        self.skip(sum(len(number) + 1 for number in numbers[done:start]))
        for place in range(start, stop):
            text = numbers[place] if place == 0 else " " + numbers[place]
            self.write(encode(text), learned=place > start or start == done)


def random_lesson(rng: Random, longest: int) -> Lesson:
    kind = rng.random()
    if kind < 0.55:
        return random_count(rng, longest)
    return random_addition(rng) if kind < 0.8 else random_fact(rng)


def short_row(rng: Random, length: int) -> Chat:
    """Many short turns; counts are short or cut, so that each row has many decisions."""
    chat = Chat()
    if rng.random() < 0.03:
        return _bare_count(rng, length)
    chat.write([BEGIN], learned=False)
    while len(chat.ids) < length:
        lesson = random_lesson(rng, LONGEST if rng.random() < 0.35 else rng.choice((4, 8, 16)))
        too_far = chat.next_position + len(lesson.answer) > CONTEXT - length
        if not lesson.is_count or lesson.answer.count(" ") < 16:
            chat.turn(lesson)
        elif not too_far:
            chat.cut_count(lesson, rng)
    return chat


def long_row(rng: Random, length: int) -> Chat:
    """Whole counts, as they are at inference, with other turns around them."""
    chat = Chat()
    chat.write([BEGIN], learned=False)
    if rng.random() < 0.4:
        chat.turn(random_lesson(rng, 24))
    while len(chat.ids) < length:
        first = 1 if rng.random() < 0.4 else rng.randint(0, rng.choice((120, HIGHEST - LONGEST)))
        room = (length - len(chat.ids)) // 4
        fitting = rng.randint(room // 2, room + 20) if rng.random() < 0.5 else rng.randint(10, 100)
        numbers = min(LONGEST, max(2, fitting))
        chat.turn(count(first, min(HIGHEST, first + numbers - 1)))
        for _ in range(rng.randint(0, 3)):
            chat.turn(random_lesson(rng, 24))
    return chat


def _bare_count(rng: Random, length: int) -> Chat:
    """No chat at all: a plain prompt "5 6 7" goes on with 8."""
    chat = Chat()
    if rng.random() < 0.5:
        chat.write([BEGIN], learned=False)
    first = rng.randint(0, rng.choice((10, LONGEST, HIGHEST - 100)))
    numbers = " ".join(str(number) for number in range(first, min(HIGHEST, first + length) + 1))
    known = len(f"{first} {first + 1}")
    chat.write(encode(numbers[:known]), learned=False)
    chat.write(encode(numbers[known:])[:length], learned=True)
    chat.write([BEGIN] * max(0, length - len(chat.ids)), learned=False)
    return chat
