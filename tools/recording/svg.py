"""Draw a recorded session as an SVG that moves: no script, so a repository's web page shows it.

Each version of a row is one text, visible during its times. Long pauses and the start of the swarm are shortened; the
clock below the screen shows the real time. A viewer without animation, or with reduced motion, shows the screen at one
mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from tools.recording.cast import MARK, Cast
from tools.recording.screen import DEFAULT, Row, Run, Style

CHARACTER, LINE, SIZE = 8.4, 18.0, 14  # pixels: width and height of a cell, size of the font
BORDER = 12.0
FRAME_SECONDS = 0.1  # changes that are closer together are one frame
PAUSE_SECONDS = 1.5  # of a screen without a change
START_SECONDS = 8.0  # until the mark READY
END_SECONDS = 4.0  # of the last screen, before it begins again
READY, STILL = "ready", "answer"  # labels of marks
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BACKGROUND, FOREGROUND = "#0d1117", "#c9d1d9"
PALETTE = {
    "black": "#484f58",
    "red": "#ff7b72",
    "green": "#3fb950",
    "brown": "#d29922",
    "blue": "#58a6ff",
    "magenta": "#bc8cff",
    "cyan": "#39c5cf",
    "white": "#c9d1d9",
}

CLOCK = "8b949e"  # contrast 6.2 to the background
STILL_STYLE = (  # for readers who ask for reduced motion; stronger than an animation
    "@media (prefers-reduced-motion:reduce){g[visibility=visible]{visibility:visible!important}"
    "g[visibility=hidden]{visibility:hidden!important}}"
)

Span = tuple[float, float]  # seconds of the picture


@dataclass(frozen=True, slots=True)
class Frame:
    shown_at: float  # seconds of the picture
    real: float  # seconds of the session
    rows: tuple[Row, ...]


@dataclass
class Film:
    """The frames of a session, and the times at which they are shown."""

    frames: list[Frame] = field(default_factory=list)
    still_at: float = 0.0  # of the screen that a viewer without animation shows

    @property
    def seconds(self) -> float:
        return self.frames[-1].shown_at + END_SECONDS


def draw(cast: Cast) -> str:
    """Return the SVG of a session."""
    film = make_film(cast)
    width = cast.columns * CHARACTER + 2 * BORDER
    height = (cast.rows + 1) * LINE + 2 * BORDER
    elements = [
        element
        for number in range(cast.rows)
        for element in draw_row(number, [frame.rows[number] for frame in film.frames], film)
    ]
    elements += draw_row(cast.rows, clock_rows(film, cast.columns), film)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="{FONT}" font-size="{SIZE}px">\n'
        f"<title>{escape(cast.title)}</title>\n<style>{STILL_STYLE}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>\n'
        + "\n".join(elements)
        + "\n</svg>\n"
    )


def make_film(cast: Cast) -> Film:
    """Choose the frames: the first of each tenth of a second, and each that a mark follows."""
    film = Film()
    start = find_start(cast)
    hurry = max(1.0, start / START_SECONDS)
    shown, before = 0.0, 0.0
    for event, rows in cast.replay():
        gap = (event.seconds - before) / (hurry if event.seconds <= start else 1.0)
        shown, before = shown + min(gap, PAUSE_SECONDS), event.seconds
        frame = Frame(shown, event.seconds, tuple(rows))
        if film.frames and shown - film.frames[-1].shown_at < FRAME_SECONDS:
            film.frames[-1] = Frame(film.frames[-1].shown_at, event.seconds, frame.rows)
        else:
            film.frames.append(frame)
        if event.kind == MARK and event.data.startswith(STILL) and not film.still_at:
            film.still_at = film.frames[-1].shown_at
    return film


def find_start(cast: Cast) -> float:
    """Return the time at which the swarm was ready."""
    times = [event.seconds for event in cast.events if (event.kind, event.data) == (MARK, READY)]
    return times[0] if times else 0.0


def clock_rows(film: Film, columns: int) -> list[Row]:
    lines = [f"{frame.real:.0f} s" for frame in film.frames]
    return [(Run(columns - len(line), line, Style(CLOCK)),) for line in lines]


def draw_row(number: int, versions: Sequence[Row], film: Film) -> Iterable[str]:
    """Yield each distinct text of one row, with the times at which it is visible."""
    spans: dict[Row, list[Span]] = {}
    for place, (row, frame) in enumerate(zip(versions, film.frames, strict=True)):
        is_last = place + 1 == len(film.frames)
        end = film.seconds if is_last else film.frames[place + 1].shown_at
        known = spans.setdefault(row, [])
        if known and known[-1][1] == frame.shown_at:
            known[-1] = (known[-1][0], end)
        else:
            known.append((frame.shown_at, end))
    for row, times in spans.items():
        if row:
            yield f"{open_group(times, film)}{draw_runs(row, number)}</g>"


def open_group(times: Sequence[Span], film: Film) -> str:
    """Return the group's tag and its animation. The attribute itself is for viewers without animation."""
    is_still = any(start <= film.still_at < end for start, end in times)
    base = "visible" if is_still else "hidden"
    if times[0] == (0.0, film.seconds):
        return "<g>"
    moments, values = [0.0], ["hidden"]
    for start, end in times:
        for moment, value in ((start, "visible"), (end, "hidden")):
            if moment == moments[-1]:
                values[-1] = value
            elif moment < film.seconds:
                moments.append(moment)
                values.append(value)
    keys = ";".join(f"{moment / film.seconds:.5f}" for moment in moments)
    return (
        f'<g visibility="{base}"><animate attributeName="visibility" calcMode="discrete" '
        f'dur="{film.seconds:.2f}s" repeatCount="indefinite" keyTimes="{keys}" '
        f'values="{";".join(values)}"/>'
    )


def draw_runs(row: Row, number: int) -> str:
    """Return the row's texts. Each has a fixed length, so that columns meet in every font."""
    top = BORDER + number * LINE
    parts = []
    for run in row:
        left, width = BORDER + run.column * CHARACTER, len(run.text) * CHARACTER
        front, back = colours_of(run.style)
        if back != BACKGROUND:
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{LINE}" fill="{back}"/>'
            )
        if run.text.strip():
            weight = ' font-weight="bold"' if run.style.is_bold else ""
            line = ' text-decoration="underline"' if run.style.is_underlined else ""
            parts.append(
                f'<text x="{left:.1f}" y="{top + LINE * 0.75:.1f}" textLength="{width:.1f}" '
                f'xml:space="preserve" fill="{front}"{weight}{line}>{escape(run.text)}</text>'
            )
    return "".join(parts)


def colours_of(style: Style) -> tuple[str, str]:
    """Return the colours of the text and of its background."""
    front, back = colour_of(style.front, FOREGROUND), colour_of(style.back, BACKGROUND)
    return (back, front) if style.is_reverse else (front, back)


def colour_of(name: str, default: str) -> str:
    if name == DEFAULT:
        return default
    return PALETTE.get(name.removeprefix("bright"), f"#{name}")
