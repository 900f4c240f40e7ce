"""The recorded session in docs is a real asciinema file, and its answers have every number once."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools.ci.newcomer.checks import counts
from tools.recording.cast import MARK, Cast, Event, read_cast
from tools.recording.panes import Pane, Recorder
from tools.recording.record_session import CAST, KILL_RANGE, PICTURE
from tools.recording.screen import Run, Screen, Style, escape_codes, text_of
from tools.recording.svg import (
    BACKGROUND,
    END_SECONDS,
    FRAME_SECONDS,
    PAUSE_SECONDS,
    draw,
    make_film,
)

SVG = "{http://www.w3.org/2000/svg}"
SMALL = [
    Event(0.0, "o", "\x1b[1;1Hone"),
    Event(0.5, "o", "\x1b[2;1H\x1b[31m<two>\x1b[0m"),
    Event(0.55, "m", "answer: 1"),
    Event(60.0, "o", "\x1b[1;1H\x1b[2Kend"),
]


@pytest.fixture(scope="module")
def recorded() -> Cast:
    return read_cast(CAST)


@pytest.fixture(scope="module")
def marks(recorded: Cast) -> dict[str, str]:
    """Return the screen's text at each mark."""
    return {label: "\n".join(lines) for label, lines in recorded.marks()}


@pytest.fixture(scope="module")
def shown(recorded: Cast) -> str:
    """Return all screens in order."""
    return "\n".join("\n".join(map(text_of, rows)) for _, rows in recorded.replay())


def find_label(marks: dict[str, str], kind: str) -> str:
    """Return the first label of a kind of mark."""
    return next(label for label in marks if label.startswith(f"{kind}: "))


def answer_in(screen: str) -> list[int]:
    """Return the numbers of the answer during which the kill happens."""
    first, last = KILL_RANGE
    answer = screen.partition(f"> Count from {first} to {last}.\n")[2]
    shown = re.match(r"[\d\s]*", answer)
    assert shown is not None
    return [int(word) for word in shown[0].split()]


def test_recorded_session_fits_a_usual_terminal(recorded: Cast) -> None:
    assert 80 <= recorded.columns <= 100
    assert 24 <= recorded.rows <= 30
    assert recorded.events[0].seconds >= 0


def test_recorded_answers_have_every_number_once(marks: dict[str, str]) -> None:
    answers = [label for label in marks if label.startswith("answer: ")]
    assert len(answers) == 2
    for label in answers:
        first, last = map(int, re.findall(r"\d+", label))
        assert counts(first, last)(marks[label]) == ""


def test_recorded_kill_is_in_the_middle_of_the_answer(marks: dict[str, str]) -> None:
    before = answer_in(marks[find_label(marks, "kill")])
    whole = answer_in(marks[find_label(marks, "answer")])

    assert whole == list(range(KILL_RANGE[0], KILL_RANGE[1] + 1))
    assert 10 < len(before) < len(whole) - 10
    assert before[:-1] == whole[: len(before) - 1]  # the last number may lack a digit


def test_recorded_kill_ends_a_server_process(marks: dict[str, str], shown: str) -> None:
    label = find_label(marks, "kill")
    server = label.removeprefix("kill: ")
    typed = re.search(rf"\$ kill -9 (\d+) +# {server}", marks[label])
    assert typed is not None
    assert re.search(rf"{server} .* {typed[1]} ", shown)
    assert re.search(rf"{server} .*killed by SIGKILL", shown)


def test_recorded_drain_empties_its_server(marks: dict[str, str], shown: str) -> None:
    server = find_label(marks, "drain").removeprefix("drain: ")
    assert f"$ modelswarm drain {server}" in shown
    assert f"{server}: empty" in shown
    assert re.search(rf"{server} .* drained ", shown)


def test_picture_is_drawn_from_the_recorded_session(recorded: Cast) -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(recorded)
    texts = "".join(ElementTree.parse(PICTURE).getroot().itertext())
    assert "kill -9" in texts
    assert "drained" in texts


def test_cast_is_read_as_it_was_written(tmp_path: Path) -> None:
    cast = Cast(20, 3, "a title", 1_700_000_000, list(SMALL))
    cast.write(tmp_path / "a.cast")
    assert read_cast(tmp_path / "a.cast") == cast


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [('"version": 2', '"version": 3', "version 3"), ("[60.0", "[0.1", "not in order")],
)
def test_wrong_cast_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "a.cast"
    Cast(20, 3, "a title", 0, list(SMALL)).write(file)
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_cast(file)


def test_film_shortens_pauses_and_joins_close_frames() -> None:
    film = make_film(Cast(20, 3, "", 0, list(SMALL)))

    assert [frame.real for frame in film.frames] == [0.0, 0.55, 60.0]
    assert film.frames[2].shown_at - film.frames[1].shown_at <= PAUSE_SECONDS + FRAME_SECONDS
    assert film.still_at == film.frames[1].shown_at
    assert abs(film.seconds - film.frames[2].shown_at - END_SECONDS) < 1e-9


def test_start_is_shown_in_a_few_seconds() -> None:
    slow = [Event(float(second), "o", f"\x1b[1;1H{second}") for second in range(100)]
    calm = make_film(Cast(20, 3, "", 0, slow))
    hurried = make_film(Cast(20, 3, "", 0, [*slow, Event(99.0, MARK, "ready")]))

    assert calm.frames[-1].shown_at > 90.0
    assert hurried.frames[-1].shown_at < 9.0


def test_drawn_row_is_visible_at_its_times_only() -> None:
    root = ElementTree.fromstring(draw(Cast(20, 3, "a < b", 0, list(SMALL))))
    groups = {"".join(group.itertext()): group for group in root.iter(f"{SVG}g")}

    assert groups["one"].get("visibility") == "visible"  # at the mark, for a still picture
    assert groups["end"].get("visibility") == "hidden"
    animation = groups["end"].find(f"{SVG}animate")
    assert animation is not None
    assert (animation.get("values") or "").split(";") == ["hidden", "visible"]
    assert groups["<two>"].find(f"{SVG}text") is not None


def test_picture_stands_still_where_motion_is_reduced() -> None:
    style = ElementTree.parse(PICTURE).getroot().findtext(f"{SVG}style") or ""
    assert style.startswith("@media (prefers-reduced-motion:reduce){")
    for value in ("visible", "hidden"):
        assert f"g[visibility={value}]{{visibility:{value}!important}}" in style


def test_every_text_of_the_picture_has_enough_contrast() -> None:
    """4.5 is the least for text in WCAG 2.2 AA."""
    fills = {text.get("fill") or "" for text in ElementTree.parse(PICTURE).iter(f"{SVG}text")}
    faint = {
        fill for fill in fills if (luminance(fill) + 0.05) / (luminance(BACKGROUND) + 0.05) < 4.5
    }
    assert faint == set()


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, 0 to 1."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return float(sum(w * each for w, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))


def test_style_survives_escape_codes() -> None:
    styles = [
        Style(front="red", is_bold=True),
        Style(front="brightbrown", back="blue"),
        Style(front="ff8000", is_underlined=True),
        Style(is_reverse=True),
    ]
    row = tuple(Run(3 * place, "abc", style) for place, style in enumerate(styles))
    screen = Screen(20, 1)
    screen.feed(escape_codes(row).encode())
    assert screen.rows() == [row]


def test_recorder_keeps_only_changed_rows() -> None:
    upper, lower = Pane("upper", 2, 20), Pane("lower", 2, 20)
    times = iter(range(100))
    recorder = Recorder([upper, lower], "", lambda: float(next(times)))
    recorder.feed(upper, b"above")
    recorder.take()
    recorder.take()
    recorder.feed(lower, b"\x1b[1mbelow\x1b[0m and a line that is longer than the terminal is wide")
    recorder.mark("both")

    assert [event.kind for event in recorder.cast.events] == ["o", "o", "m"]
    assert "above" not in recorder.cast.events[1].data
    [(label, lines)] = recorder.cast.marks()
    assert label == "both"
    assert lines[0].startswith("── upper ──")
    assert [lines[1], lines[3][:8]] == ["above", "── lower"]
    assert lines[5] == " terminal is wide"
