"""The oracle of the fault injection reports violations, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from chaos.schedule import LEASE_SECONDS
from support.chaos.clients import Observation
from support.chaos.oracle import ANOTHER, REFUSAL_SECONDS, Oracle, Outage
from support.chaos.reference import check_text
from support.models.tiny_models import write_tokenizer
from support.processes.server import gone_within, group_alive
from support.processes.streams import Answer, Request
from tokenizers import Tokenizer

TWIN = Answer(Request((1, 2, 3), 4), (7, 8, 9, 7), (3, 4, 5, 6), "abca", "length")
CUT = replace(TWIN, tokens=(7, 8), positions=(3, 4), text="ab", finish="")
KILL = Outage(95.0, 95.0, killed=True)  # of the gateway, while all of this happens
LONG_AGO = Outage(20.0, 20.0, killed=True)
LEAVES = Outage(85.0, 115.0, killed=True)
FROZEN = Outage(91.0, 99.0, killed=False)
NOTHING = replace(CUT, tokens=(), positions=(), text="")
NAMED = replace(TWIN.request, session="s")


def observation(answer: Answer, code: str = "", **changes: object) -> Observation:
    made = Observation("c0", answer, TWIN, began=90.0, ended=100.0, asked=90.0, code=code)
    return replace(made, **changes)  # type: ignore[arg-type]


def violations(
    observed: Observation, outages: tuple[Outage, ...] = (), gateways: int = 1
) -> list[str]:
    oracle = Oracle(10.0, outages, None, gateways)
    oracle.observe(observed)
    return oracle.wrong


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
        replace(CUT, text="abb"),  # a piece of text came twice, and then it broke off
        replace(CUT, text="b"),  # one was lost
    ),
)  # fmt: skip
def test_a_wrong_answer_is_found(answer: Answer) -> None:
    assert violations(observation(answer, "" if answer.finish else "UNAVAILABLE"), (KILL,))


def test_exact_answer_passes() -> None:
    assert not violations(observation(TWIN))


@pytest.mark.parametrize(
    ("answer", "code", "outages"),
    (
        (CUT, "", ()),  # no finish and no error
        (CUT, "UNAVAILABLE", ()),  # the gateway was not killed
        (CUT, "UNAVAILABLE", (LONG_AGO,)),  # not then
        (CUT, "UNAVAILABLE", (FROZEN,)),  # who stands still keeps its connections, and goes on
        (CUT, "session_lost", ()),
        (CUT, "session_lost", (LONG_AGO,)),
        (CUT, "session_lost", (KILL,)),  # its tail lives, and has it
        (NOTHING, "model_not_found", (LONG_AGO,)),
        (NOTHING, "session_elsewhere", ()),  # there is no other gateway
        (CUT, "session_elsewhere", (KILL,)),
        (CUT, "no_capacity", ()),  # too late for that
        (CUT, "stream_broken", (KILL,)),
        (CUT, "internal_error", (KILL,)),
        (CUT, "DEADLINE_EXCEEDED", (KILL,)),
    ),
)
def test_dishonest_end_is_found(answer: Answer, code: str, outages: tuple[Outage, ...]) -> None:
    assert violations(observation(answer, code), outages)


def test_honest_ends_pass() -> None:
    assert not violations(observation(NOTHING, "no_servers"))
    assert not violations(observation(NOTHING, "no_capacity"))
    assert not violations(
        observation(replace(NOTHING, request=NAMED), "session_elsewhere"), gateways=2
    )
    assert not violations(observation(replace(NOTHING, request=NAMED), "session_busy"), (FROZEN,))
    assert not violations(observation(CUT, "UNAVAILABLE"), (KILL,))
    assert not violations(observation(CUT, left=True)), "the client itself broke it off"


def test_a_wait_beyond_its_bound_is_found() -> None:
    assert violations(observation(TWIN, longest_wait=11.0))
    assert not violations(observation(TWIN, longest_wait=9.0))


def test_endless_refusal_is_found() -> None:
    observed = observation(NOTHING, "no_capacity", asked=100.0 - REFUSAL_SECONDS - 1.0)
    assert violations(observed)
    assert not violations(replace(observed, asked=100.0 - REFUSAL_SECONDS + 1.0))


@pytest.mark.parametrize(
    ("died", "last_wait", "forks", "right"),
    (
        (94.0, 6.0, False, True),  # the tail, after the last token
        (LEAVES, 6.0, False, True),
        (80.0, 6.0, False, False),  # long before it: another one had taken its place
        (None, 6.0, False, False),  # no tail was lost
        (None, 2 * LEASE_SECONDS + 1.0, False, True),  # the servers do not keep it for longer
        (None, 6.0, True, True),  # a gateway without links to its servers has begun it once more
    ),
)
def test_loss_with_a_gateway_requires_loss_of_its_tail(
    died: float | Outage | None, last_wait: float, forks: bool, right: bool
) -> None:
    loss = Outage(died, died, killed=True) if isinstance(died, float) else died
    losses = () if loss is None else (loss,)
    for observed in (
        observation(CUT, "session_lost", last_wait=last_wait),
        observation(CUT, "invalid_request", last_wait=last_wait, details=f"it {ANOTHER}"),
    ):
        oracle = Oracle(10.0, (KILL,), None, gateways=2, losses=losses, forks=forks)
        oracle.observe(observed)
        assert bool(oracle.wrong) is not right
    unhurt = Oracle(10.0, (), None, gateways=2, losses=losses, forks=forks)
    unhurt.observe(observation(CUT, "session_lost", last_wait=last_wait))
    assert unhurt.wrong, "no gateway was hurt"


def test_broken_connection_without_gateway_fault_is_found() -> None:
    """Readers resume at another gateway, so that the answer itself is right."""
    assert violations(observation(TWIN, breaks=1))
    assert violations(observation(TWIN, breaks=1), (LONG_AGO,))
    assert not violations(observation(TWIN, breaks=1), (KILL,))
    assert not violations(observation(TWIN, breaks=1), (FROZEN,))


def test_answer_that_parted_at_a_near_tie_has_full_length() -> None:
    oracle = Oracle(10.0, (), lambda twin, answer: None)
    parted = replace(TWIN, tokens=(7, 8, 8, 8))
    oracle.observe(observation(parted))
    assert not oracle.wrong
    oracle.observe(observation(replace(parted, tokens=(7, 8, 8), positions=(3, 4, 5))))
    assert oracle.wrong, "a token was lost at its end"


def test_text_that_does_not_match_its_tokens_is_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = tuple(tokenizer.encode("abca").ids)
    right = replace(TWIN, tokens=tokens)
    check_text(tokenizer, right)
    check_text(tokenizer, replace(right, text="abc", finish=""))
    for wrong in (
        replace(right, text="abcaa"),
        replace(right, text="abc"),
        replace(right, text="bca", finish=""),
    ):
        with pytest.raises(AssertionError):
            check_text(tokenizer, wrong)


def test_child_that_outlives_its_process_is_found() -> None:
    """The child is in its parent's process group, which has no other member."""
    parent = subprocess.Popen(
        ("sh", "-c", "sleep 60 & echo; exec sleep 60"), process_group=0, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    parent.stdout.close()
    parent.kill()
    parent.wait()
    try:
        assert gone_within([parent.pid], 5.0)
        assert not gone_within([parent.pid], 0.1, group_alive)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
    assert gone_within([parent.pid], 5.0, group_alive)


def test_difference_after_rounding_is_settled_by_the_model() -> None:
    settled: list[tuple[Answer, Answer]] = []

    def settle(twin: Answer, answer: Answer) -> None:
        settled.append((twin, answer))
        assert answer.tokens[2] != 1, "no near tie"

    oracle = Oracle(10.0, (), settle)
    tie, wrong = replace(TWIN, tokens=(7, 8, 8, 8)), replace(TWIN, tokens=(7, 8, 1, 1))
    for answer in (TWIN, tie, wrong):
        oracle.observe(observation(answer))
    assert not oracle.wrong, "it takes long, and comes last"
    oracle.finish()
    assert [answer.tokens for _, answer in settled] == [tie.tokens, wrong.tokens]
    assert len(oracle.wrong) == oracle.tally.near_ties == 1
