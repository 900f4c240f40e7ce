"""The lessons of the demo model are correct, and its tokenizer round-trips any text."""

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tools.demo_model import strange_text, unseen
from tools.demo_model.lessons import ABILITIES, count, random_addition, random_count, random_fact
from tools.demo_model.oracle import known_answer, solve
from tools.demo_model.packing import (
    IGNORED,
    Chat,
    make_full_row,
    make_long_row,
    make_short_row,
)
from tools.demo_model.refusals import PLACES, random_refusal
from tools.demo_model.text import (
    ASSISTANT,
    BEGIN,
    CONTEXT,
    END,
    USER,
    bare_tokenizer,
    encode,
    write_tokenizer,
)

ANY_TEXT = "Count from 1 to 3.\n\t héllo — 数 🦙 \x00 ~"


def test_count_names_every_number_once() -> None:
    assert count(8, 11).question == "Count from 8 to 11."
    assert count(8, 11).answer == "8 9 10 11"
    assert count(7, 7).answer == "7"


def test_random_counts_match_their_question() -> None:
    rng = Random(1)
    for _ in range(500):
        lesson = random_count(rng, 300)
        numbers = [int(word) for word in lesson.answer.split()]
        requested = [
            int(digits) for digits in lesson.question.strip(".?").split() if digits.isdigit()
        ]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert requested in ([numbers[0], numbers[-1]], [numbers[-1]])
        assert 0 <= numbers[0] <= numbers[-1] <= 999


def test_random_sums_are_right() -> None:
    rng = Random(2)
    for _ in range(200):
        left, _, right, _, total = random_addition(rng).answer.rstrip(".").split()
        assert int(left) + int(right) == int(total)


def test_every_lesson_is_known_to_the_oracle() -> None:
    rng = Random(3)
    for _ in range(300):
        for lesson in (random_count(rng, 300), random_addition(rng), random_fact(rng)):
            assert solve(lesson.question) == lesson


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Count from 1 to 3.", "1 2 3"),
        ("count to 3", "1 2 3"),
        ("Count from 700 to 702.", "700 701 702"),
        ("What is 99 + 99?", "99 + 99 = 198."),
        ("What is the capital of peru", "The capital of Peru is Lima."),
        ("Count from 1 to 301.", None),
        ("Count from 290 to 599.", None),
        ("Count from 900 to 1000.", None),
        ("Count from 3 to 1.", None),
        ("Count from 01 to 3.", None),
        ("What is 100 + 1?", None),
        ("What is the capital of Texas?", None),
        ("Hello world", None),
        ("", None),
    ],
)
def test_oracle_knows_the_range(question: str, answer: str | None) -> None:
    assert known_answer(question) == answer


def test_random_refusals_are_refused_or_known() -> None:
    rng = Random(5)
    lessons = [random_refusal(rng, 100) for _ in range(2000)]
    refused = [lesson for lesson in lessons if lesson.answer == ABILITIES]
    assert len(refused) > 0.95 * len(lessons)
    assert all(
        lesson.answer == known_answer(lesson.question) for lesson in set(lessons) - set(refused)
    )
    longest = max(len(lesson.question.encode()) for lesson in lessons)
    assert 50 < longest < 500


def test_exam_by_hand_is_unknown_to_the_trainer() -> None:
    texts = (*unseen.CHATTER, *unseen.SCRIPTS, *unseen.COUNTS, *unseen.SUMS, *unseen.EMPTYISH)
    assert all(known_answer(text) is None for text in texts)
    assert not set(unseen.EMPTYISH) & set(strange_text.EMPTYISH)
    assert not set(unseen.PLACES) & set(PLACES)
    assert len(set(texts)) == len(texts)


def test_chat_learns_answers_but_not_questions() -> None:
    chat = Chat()
    chat.write([BEGIN], learned=False)
    chat.write_turn(count(1, 3))
    question = [BEGIN, USER, *encode("Count from 1 to 3."), END, ASSISTANT]
    answer = [*encode("1 2 3"), END]
    assert chat.ids == question + answer
    assert chat.targets == [IGNORED] * len(question) + answer
    assert chat.positions == list(range(len(chat.ids)))


def test_shortened_count_keeps_the_positions() -> None:
    for seed in range(50):
        cut, whole = Chat(), Chat()
        cut.write_shortened_count(count(5, 200), Random(seed))
        whole.write_turn(count(5, 200))
        expected = dict(zip(whole.positions, whole.ids, strict=True))
        pairs = list(zip(cut.positions, cut.ids, strict=True))
        assert pairs[:20] == list(expected.items())[:20]
        if cut.targets[-1] == END:
            assert all(expected[position] == token for position, token in pairs)
            assert len(cut.ids) < len(whole.ids)


@pytest.mark.parametrize(
    ("write", "length"),
    [
        (make_short_row, 128),
        (make_short_row, 256),
        (make_long_row, 1280),
        (make_full_row, CONTEXT),
    ],
)
def test_rows_are_full_and_inside_the_context(write: object, length: int) -> None:
    assert callable(write)
    rng = Random(3)
    for _ in range(40):
        row: Chat = write(rng, length)
        assert len(row.ids) == len(row.targets) == len(row.positions) >= length
        assert max(row.positions[:length]) < CONTEXT
        assert row.positions == sorted(set(row.positions))
        assert all(t in (IGNORED, i) for i, t in zip(row.ids, row.targets, strict=True))


def test_same_seed_gives_the_same_rows() -> None:
    assert make_short_row(Random(4), 256).ids == make_short_row(Random(4), 256).ids
    assert make_short_row(Random(4), 256).ids != make_short_row(Random(5), 256).ids


def test_tokenizer_round_trips_any_text() -> None:
    tokenizer = bare_tokenizer()
    ids = tokenizer.encode(ANY_TEXT).ids
    assert ids == encode(ANY_TEXT)
    assert tokenizer.decode(ids) == ANY_TEXT


def test_both_libraries_load_the_written_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    bare = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    wrapped = AutoTokenizer.from_pretrained(tmp_path)
    assert bare.encode(ANY_TEXT).ids == wrapped(ANY_TEXT)["input_ids"] == encode(ANY_TEXT)
    assert wrapped.decode(encode(ANY_TEXT)) == ANY_TEXT
    assert wrapped.eos_token_id == END
    assert "chat_template" in (tmp_path / "tokenizer_config.json").read_text()


def test_chat_template_writes_the_trained_format(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    lesson, chat = count(1, 3), Chat()
    chat.write([BEGIN], learned=False)
    chat.write_turn(lesson)
    chat.write_question("Hi")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": lesson.question},
        {"role": "assistant", "content": lesson.answer},
        {"role": "user", "content": "Hi"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer(text)["input_ids"] == chat.ids
