"""Draw docs/pictures/timeline.svg, the README's picture: the tokens of one answer, before and after a server is killed.

Run by a developer: `.venv/bin/python tools/recording/draw_timeline.py`. It starts the demo's swarm and asks its
question twice, the second time with a SIGKILL of the tail in the middle. It draws the time of each token. Nothing in
the picture is made up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from modelswarm.cli.demo.comparison import Recording
from modelswarm.cli.demo.example import load_example
from modelswarm.client.inference import InferenceClient, ReceivedChunk
from modelswarm.client.swarm import SwarmClient
from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of

TARGET = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "timeline.svg"
QUESTION = "Count from 1 to 200."
MAX_TOKENS = 600
KILL_AFTER_TOKENS = 200
SECONDS_BEFORE, SECONDS_AFTER = 0.35, 0.65  # of the stream, around the kill
WIDTH, LEFT, RIGHT = 860, 150, 20  # pixels
ROWS = (70, 120)  # y of the two streams, pixels


def main() -> None:
    plan = plan_document(load_example())
    settings = LocalSettings(publish=False, run_name=f"timeline-{os.getpid()}")
    swarm = LocalSwarm(plan, settings)
    try:
        swarm.start()
        with InferenceClient(swarm.grpc) as client, SwarmClient(swarm.admin) as state:
            calm = Recording(tuple(client.stream_chat(plan.served_name, QUESTION, MAX_TOKENS)))
            chunks: list[ReceivedChunk] = []
            killed_at, seen = 0.0, 0
            for chunk in client.stream_chat(plan.served_name, QUESTION, MAX_TOKENS):
                chunks.append(chunk)
                seen += len(chunk.tokens)
                if not killed_at and seen >= KILL_AFTER_TOKENS:
                    route = state.fetch_running_route()
                    killed_at = time.monotonic()
                    swarm.kill(name_of(route[-1].peer))
    finally:
        swarm.stop()
    killed = Recording(tuple(chunks))
    assert killed.tokens == calm.tokens, "the two runs differ"
    TARGET.write_text(draw(calm, killed, killed_at), encoding="utf-8")
    print(f"{TARGET}: longest gap {killed.longest_gap * 1000:.0f} ms, {len(killed.tokens)} tokens")


def draw(calm: Recording, killed: Recording, killed_at: float) -> str:
    """The SVG of both streams on one time axis, whose zero is the kill."""
    index = next(i for i, chunk in enumerate(killed.chunks) if chunk.at > killed_at)
    same = calm.chunks[min(index, len(calm.chunks) - 1)].at  # the same token without a kill
    scale = (WIDTH - LEFT - RIGHT) / (SECONDS_BEFORE + SECONDS_AFTER)

    def x_of(at: float) -> float:
        return LEFT + (at + SECONDS_BEFORE) * scale

    parts = [_axis(x_of)]
    for y, name, recording, zero in (
        (ROWS[0], "no failure", calm, same),
        (ROWS[1], "kill -9 of a server", killed, killed_at),
    ):
        parts.append(f'<text x="10" y="{y + 4}">{name}</text>')
        times = [chunk.at - zero for chunk in recording.chunks if chunk.tokens]
        parts += [
            f'<rect x="{x_of(at):.1f}" y="{y - 12}" width="2" height="24" class="token"/>'
            for at in times
            if -SECONDS_BEFORE <= at <= SECONDS_AFTER
        ]
    x, gap = x_of(0.0), killed.longest_gap * 1000
    caption = (
        f"one bar: one token at the client. Longest gap {gap:.0f} ms, median "
        f"{killed.median_gap * 1000:.0f} ms; {len(killed.tokens)} tokens, identical in both runs."
    )
    parts += [
        f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="140" class="kill"/>',
        f'<text x="{x + 6:.1f}" y="38" class="kill">SIGKILL</text>',
        f'<text x="{LEFT}" y="196">{caption}</text>',
    ]
    style = (
        "text{font:13px sans-serif;fill:#57606a}.token{fill:#2da44e}"
        ".kill{stroke:#cf222e;stroke-width:1.5}text.kill{fill:#cf222e;stroke:none}.axis{stroke:#8c959f}"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 210" role="img" '
        f'aria-label="Tokens of a stream before and after a kill">\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" rx="8" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _axis(x_of: Callable[[float], float]) -> str:
    marks = [round(-SECONDS_BEFORE + 0.05 + 0.1 * n, 2) for n in range(10)]
    ticks = "".join(
        f'<text x="{x_of(mark) - 14:.1f}" y="166">{mark * 1000:+.0f} ms</text>'
        for mark in marks[::2]
    )
    line = f'<line x1="{LEFT}" y1="148" x2="{WIDTH - RIGHT}" y2="148" class="axis"/>'
    return line + ticks


if __name__ == "__main__":
    main()
