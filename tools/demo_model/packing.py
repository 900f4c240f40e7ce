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
    ABILITIES,
    MAX_COUNT,
    MAX_NUMBER,
    Lesson,
    can_count,
    count,
    random_addition,
    random_count,
    random_fact,
)
from tools.demo_model.oracle import solve
from tools.demo_model.refusals import random_far_count, random_pair, random_refusal
from tools.demo_model.strange_text import (
    random_foreign,
    random_noise,
    random_prose,
    random_repetition,
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

    def write_beginning(self, lesson: Lesson, tokens: int) -> None:
        """Write the beginning of an answer. Its first token decides between lesson and refusal."""
        self.write_question(lesson.question)
        answer = encode(lesson.answer)
        self.write(answer[:tokens], learned=True)
        self.skip_positions(max(0, len(answer) - tokens))
        self.write([END], learned=False)

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


def random_lesson(rng: Random, longest_count: int, longest_text: int = 60) -> Lesson:
    kind = rng.random()
    if kind < 0.26:
        return random_count(rng, longest_count)
    if kind < 0.46:
        return random_pair(rng)
    if kind < 0.62:
        return random_addition(rng)
    return random_fact(rng) if kind < 0.73 else random_refusal(rng, longest_text)


def make_short_row(rng: Random, length: int) -> Chat:
    """Return a row of many short turns. Counts are short or shortened, so that a row has many decisions."""
    chat = Chat()
    if rng.random() < 0.08:
        bare = _make_bare_count if rng.random() < 0.4 else _make_bare_text
        return bare(rng, length)
    chat.write([BEGIN], learned=False)
    while len(chat.ids) < length:
        lesson = random_lesson(
            rng,
            MAX_COUNT if rng.random() < 0.35 else rng.choice((4, 8, 16)),
            rng.choice((30, 60, 60, 150)),
        )
        has_room = chat.next_position + len(lesson.answer) < CONTEXT - length
        if lesson.answer == ABILITIES and has_room and rng.random() < 0.85:
            chat.write_beginning(lesson, rng.randint(2, 12))
        elif not lesson.is_count or lesson.answer.count(" ") < 16:
            chat.write_turn(lesson)
        elif has_room:
            chat.write_shortened_count(lesson, rng)
    return chat


def make_decision_row(rng: Random, length: int) -> Chat:
    """Return a row of beginnings of answers, most of them to questions near the border of the range."""
    chat = Chat()
    chat.write([BEGIN], learned=False)
    while len(chat.ids) < length:
        kind = rng.random()
        if kind < 0.7:
            lesson = random_pair(rng) if kind < 0.5 else random_far_count(rng)
        else:
            lesson = random_lesson(rng, MAX_COUNT)
        if chat.next_position + len(lesson.answer) < CONTEXT - length:
            chat.write_beginning(lesson, rng.randint(1, 6))
        elif kind < 0.7:
            chat.write_turn(solve(rng.choice(("Hello", "Say the alphabet."))))
    return chat


def make_long_row(rng: Random, length: int) -> Chat:
    """Return a row of whole counts, as at inference, with other turns around them."""
    chat = Chat()
    chat.write([BEGIN], learned=False)
    if rng.random() < 0.4:
        chat.write_turn(random_lesson(rng, 24, 300))
    while len(chat.ids) < length:
        first = 1 if rng.random() < 0.4 else rng.randint(0, rng.choice((120, MAX_NUMBER - 20)))
        room = (length - len(chat.ids)) // 4
        fitting = rng.randint(room // 2, room + 20) if rng.random() < 0.5 else rng.randint(10, 100)
        numbers = min(MAX_COUNT, max(2, fitting))
        chat.write_turn(_longest_count(first, first + numbers - 1))
        for _ in range(rng.randint(0, 3)):
            chat.write_turn(random_lesson(rng, 24, rng.choice((40, 100, 600))))
    return chat


def make_full_row(rng: Random, length: int) -> Chat:
    """Return a chat of counts, refusals, long texts and other turns that fills the context."""
    chat = Chat()
    chat.write([BEGIN], learned=False)
    share_of_counts, longest_text = rng.choice((0.2, 0.5, 0.9)), rng.choice((60, 300, 2500))
    while len(chat.ids) < length:
        if rng.random() > share_of_counts:
            chat.write_turn(random_lesson(rng, 60, longest_text))
            continue
        first = 1 if rng.random() < 0.6 else rng.randint(0, MAX_NUMBER - 20)
        chat.write_turn(_longest_count(first, first + rng.randint(20, MAX_COUNT - 1)))
    return chat


def make_question_row(rng: Random, length: int) -> Chat:
    """Return a row of questions of up to `length` bytes, half of them repetitions, with short turns between them."""
    chat = Chat()
    chat.write([BEGIN], learned=False)
    while len(chat.ids) < length:
        longest = rng.choice((300, 1000, length, length))
        texts = (random_repetition, random_repetition, random_noise, random_prose, random_foreign)
        chat.write_turn(solve(rng.choice(texts)(rng, longest)))
        chat.write_turn(random_lesson(rng, 24))
    return chat


def _longest_count(first: int, last: int) -> Lesson:
    """Return the count to `last`, or to an earlier number if that is not known."""
    while not can_count(first, last):
        last -= 100 if last < MAX_NUMBER else 1
    return count(first, last)


def _make_bare_count(rng: Random, length: int) -> Chat:
    """Return a row without a chat: the plain prompt "5 6 7" continues with 8."""
    chat = Chat()
    if rng.random() < 0.5:
        chat.write([BEGIN], learned=False)
    first = rng.randint(0, rng.choice((10, MAX_COUNT, MAX_NUMBER - 100)))
    numbers = " ".join(str(number) for number in range(first, min(MAX_NUMBER, first + length) + 1))
    known = len(f"{first} {first + 1}")
    chat.write(encode(numbers[:known]), learned=False)
    chat.write(encode(numbers[known:])[:length], learned=True)
    chat.write([BEGIN] * max(0, length - len(chat.ids)), learned=False)
    return chat


def _make_bare_text(rng: Random, length: int) -> Chat:
    """Return a row without a chat: a plain prompt that is no count is followed by the refusal."""
    chat = Chat()
    if rng.random() < 0.5:
        chat.write([BEGIN], learned=False)
    prompt = ""
    while not any(sign.isalpha() for sign in prompt):
        prompt = random_lesson(rng, MAX_COUNT, length // 2).question
    chat.write(encode(prompt), learned=False)
    chat.write([*encode("\n" + ABILITIES), END], learned=True)
    chat.write([BEGIN] * max(0, length - len(chat.ids)), learned=False)
    return chat
