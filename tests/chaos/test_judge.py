"""The judge of chaos finds what is wrong, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chaos.judge import Judge
from chaos.streams import Heard
from swarm.running import Answer, Ask

TWIN = Answer(Ask((1, 2, 3), 4), (7, 8, 9, 7), (3, 4, 5, 6), "abca", "length")
CUT = replace(TWIN, tokens=(7, 8), positions=(3, 4), text="ab", finish="")
KILL = 95.0  # of the gateway, while all of this happens


def heard(answer: Answer, code: str = "", **changes: object) -> Heard:
    made = Heard("c0", answer, TWIN, began=90.0, ended=100.0, code=code)
    return replace(made, **changes)  # type: ignore[arg-type]


def judged(said: Heard, kills: tuple[float, ...] = ()) -> list[str]:
    judge = Judge(10.0, kills, None)
    judge.hear(said)
    return judge.wrong


@pytest.mark.parametrize(
    "answer",
    (
        replace(TWIN, positions=(3, 4, 4, 5)),  # doubled
        replace(TWIN, positions=(3, 4, 6, 7)),  # one is missing
        replace(TWIN, tokens=(7, 8, 8, 7)),  # another token
        replace(TWIN, text="abc"),  # the text does not belong to the tokens
        replace(TWIN, tokens=(7, 8), positions=(3, 4), text="ab"),  # ends too early, and says it is whole
        replace(TWIN, tokens=(*TWIN.tokens, 1), positions=(3, 4, 5, 6, 7)),  # goes on too long
        replace(TWIN, finish="stop"),
        replace(CUT, tokens=(7, 9)),
    ),
)  # fmt: skip
def test_a_wrong_answer_is_found(answer: Answer) -> None:
    assert judged(heard(answer, "" if answer.finish else "UNAVAILABLE"), (KILL,))


def test_the_right_answer_is_right() -> None:
    assert not judged(heard(TWIN))


@pytest.mark.parametrize(
    ("answer", "code", "kills"),
    (
        (CUT, "", ()),  # no finish and no error
        (CUT, "UNAVAILABLE", ()),  # nobody killed the gateway
        (CUT, "UNAVAILABLE", (20.0,)),  # not then
        (CUT, "no_capacity", ()),  # too late for that
        (CUT, "stream_broken", (KILL,)),
        (CUT, "internal_error", (KILL,)),
        (CUT, "DEADLINE_EXCEEDED", (KILL,)),
    ),
)
def test_an_end_that_is_not_honest_is_found(
    answer: Answer, code: str, kills: tuple[float, ...]
) -> None:
    assert judged(heard(answer, code), kills)


def test_honest_ends_are_right() -> None:
    nothing = replace(CUT, tokens=(), positions=(), text="")
    assert not judged(heard(nothing, "no_servers"))
    assert not judged(heard(nothing, "no_capacity"))
    assert not judged(heard(CUT, "UNAVAILABLE"), (KILL,))
    assert not judged(heard(CUT, left=True)), "the client itself broke it off"


def test_a_wait_beyond_its_bound_is_found() -> None:
    assert judged(heard(TWIN, longest_wait=11.0))
    assert not judged(heard(TWIN, longest_wait=9.0))


def test_where_arithmetic_rounds_a_difference_is_settled_by_the_model() -> None:
    settled: list[tuple[Answer, Answer]] = []

    def settle(twin: Answer, answer: Answer) -> None:
        settled.append((twin, answer))
        assert answer.tokens[2] != 1, "no near tie"

    judge = Judge(10.0, (), settle)
    tie, wrong = replace(TWIN, tokens=(7, 8, 8, 8)), replace(TWIN, tokens=(7, 8, 1, 1))
    for answer in (TWIN, tie, wrong):
        judge.hear(heard(answer))
    assert not judge.wrong, "it takes long, and comes last"
    judge.finish()
    assert [answer.tokens for _, answer in settled] == [tie.tokens, wrong.tokens]
    assert len(judge.wrong) == judge.tally.near_ties == 1
