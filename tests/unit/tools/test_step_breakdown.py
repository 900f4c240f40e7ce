"""The breakdown of a hop: every time between two frames is in exactly one part, and the socket is between servers."""

from __future__ import annotations

import pytest

from bench.speed.step_breakdown import NEW, SOCKET, TITLES, WRITE, part_medians, table_rows
from bench.speed.timed_server import MARKS, Recorder, Step
from modelswarm.protocol.link import lane

TURN, STEP = 1_000_000, 10_000  # ns between steps of a server; between two marks


def make_steps(start: int, count: int = NEW) -> list[Step]:
    """Return steps whose marks are 10, 20, 30 ... us apart."""
    spans = [STEP * number * (number + 1) // 2 for number in range(len(MARKS))]
    return [
        {mark: start + turn * TURN + at for mark, at in zip(MARKS, spans, strict=True)}
        for turn in range(count)
    ]


def test_parts_are_the_times_between_marks() -> None:
    before, steps = make_steps(0), make_steps(700_000)
    found = part_medians([{"frame": 1}, *steps], before)
    assert [found[title] for title in TITLES] == [10.0 * (n + 1) for n in range(len(TITLES))]
    assert found[WRITE] == 10.0 * (len(MARKS) - 1)
    assert found[SOCKET] == 700 - 10.0 * sum(range(len(MARKS) - 1))


def test_sum_leaves_out_what_is_a_part_of_another() -> None:
    each = part_medians(make_steps(700_000), make_steps(0))
    rows = table_rows([each, each, each], 2345.0)
    assert rows[-2] == ("all parts", "700", "700", "700")
    assert rows[-1][0] == "three servers 2100; at the client 2345"


def test_server_without_whole_steps_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="only 3 whole steps"):
        part_medians(make_steps(0, 3), make_steps(0))


def test_every_mark_but_the_frames_has_its_place_in_the_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A renamed method is an error, not a mark that is missing."""
    from modelswarm_serving.model.transformer.span import TransformerSpan
    from modelswarm_serving.runtime.engine import Engine
    from modelswarm_serving.runtime.node import Node

    for owner, name in (
        (Node, "on_items"),
        (Node, "_on_step_done"),
        (Engine, "submit"),
        (TransformerSpan, "step"),
        (TransformerSpan, "_run_blocks"),
        (lane, "pack"),
        (lane, "unpack"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # taken back afterwards
    recorder = Recorder()
    recorder.install()
    assert list(vars(lane)["pack"]([], None)) == []
