"""The session that each log goes on with, and the forks, after beams were reordered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from modelswarm.protocol.beam_forks import FORK_TOKENS, Source, choose_sources
from modelswarm.protocol.input_log import common_prefix_length

ONE, TWO = tuple(range(100)), tuple(range(1000, 1100))
LONG = tuple(range(FORK_TOKENS + 50))


def test_first_logs_get_new_sessions() -> None:
    assert choose_sources([], [ONE, TWO]) == [Source(), Source()]


def test_beams_of_one_prompt_fork_its_session() -> None:
    logs = [(*ONE, token) for token in (1, 2, 3)]
    fork = Source(None, 0, 100)
    assert choose_sources([ONE], logs) == [Source(0), fork, fork]


def test_beams_leave_sessions_of_other_prompts_alone() -> None:
    logs = [(*ONE, 1), (*ONE, 2), (*TWO, 1), (*TWO, 2)]
    sources = choose_sources([ONE, TWO], logs)
    assert sources == [Source(0), Source(None, 0, 100), Source(1), Source(None, 1, 100)]


def test_session_of_a_dropped_beam_is_rewound() -> None:
    sessions = [(*ONE, 1, 5), (*ONE, 2, 6)]
    logs = [(*ONE, 2, 6, 7), (*ONE, 2, 6, 8)]
    assert choose_sources(sessions, logs) == [Source(1), Source(0)]


def test_beam_that_is_far_from_free_sessions_is_forked() -> None:
    sessions = [LONG, ONE[:20]]
    logs = [(*LONG, 1), (*LONG, 2)]
    assert choose_sources(sessions, logs) == [Source(0), Source(1, 0, len(LONG))]
    near = LONG[: FORK_TOKENS + 9]
    logs = [(*near, 1), (*near, 2)]
    assert choose_sources([near, near[:10]], logs) == [Source(0), Source(1)]


def test_fork_has_less_than_the_whole_log() -> None:
    assert choose_sources([ONE], [ONE[:50], ONE[:40]]) == [Source(0), Source(None, 0, 39)]


class _CountedLog(tuple[int, ...]):
    """A log that counts the entries that are read of it."""

    read = 0

    @override
    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        _CountedLog.read += len(found) if isinstance(place, slice) else 1
        return found

    @override
    def __iter__(self) -> Iterator[int]:
        _CountedLog.read += len(self)
        return super().__iter__()


def test_prompt_of_all_beams_is_compared_once() -> None:
    """Comparing each with each took the gateway's event loop 0.9 s for 17 beams of 30,000 tokens, at each step."""
    prompt = tuple(range(5000))
    sessions = [_CountedLog((*prompt, place, 1)) for place in range(8)]
    logs = [_CountedLog((*prompt, place, 1, 2)) for place in range(8)]
    assert choose_sources(sessions, logs) == [Source(place) for place in range(8)]
    assert _CountedLog.read < 4 * 16 * len(logs[0])


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9), st.data())
def test_common_prefix_is_found_across_parts(
    one: list[int], other: list[int], data: st.DataObject
) -> None:
    before = [5] * data.draw(st.sampled_from([0, 1020, 1024, 2047]))
    wanted = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    wanted = min(len(one), len(other)) if wanted is None else wanted
    found = common_prefix_length([*before, *one], (*before, *other))
    assert found == len(before) + wanted
