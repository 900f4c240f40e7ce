"""Guided JSON and forced calls go on unchanged when their tail is frozen by SIGSTOP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from processes.structured.test_guided_recovery import (
    BODIES,
    HIT_AT,
    Read,
    calm_answer,
    check_same,
    stream,
)
from support.models.structured import make_structured_model
from support.processes.swarm import Running, local_settings, running_swarm

from modelswarm.protocol.identity import name_of

pytestmark = pytest.mark.full  # two seconds of silence in each test
NOTICED = ("--suspect-after", "2", "--fence-timeout", "3")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_structured_model(tmp_path_factory.mktemp("scripted"))
    settings = local_settings("frozen-answers", gateway_flags=NOTICED, detects_silence=True)
    with running_swarm(folder, "frozen-answers", spans=2, replicas=2, settings=settings) as made:
        yield made


@pytest.mark.parametrize("kind", BODIES)
def test_frozen_tail_changes_nothing(running: Running, kind: str) -> None:
    calm, got = calm_answer(running, kind), Read()
    before, frozen = running.faults().resumed, list[str]()

    def hit(events: int) -> None:
        if events == HIT_AT and not frozen:
            frozen.append(name_of(running.only_session().route[-1].peer))
            running.local.kill(frozen[0], signal.SIGSTOP)

    body: dict[str, Any] = BODIES[kind]
    try:
        stream(running.local.http, body, got, hit)
    finally:
        for name in frozen:
            running.local.kill(name, signal.SIGCONT)
    assert running.faults().resumed > before
    check_same(got, calm)
