"""The session that each log goes on with, and the forks, after beams were reordered."""

from __future__ import annotations

from modelswarm.protocol.beam_forks import FORK_TOKENS, Source, choose_sources

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
