"""SIGKILL of a server on the route until the next token at the client, 1K-token contexts, 2 spans x 2 servers.

Every stream is compared with the same stream without a kill: `lost` and `doubled` count tokens whose position is
missing or repeated; a token that differs is a lost one. The killed server is restarted before the next kill.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise

from bench.harness import Bar, Result, quantile
from bench.models import SHAPES, model_folder
from bench.swarm import Door, Recorder, Streamed, swarm_of
from modelswarm.local.swarm import LocalSwarm
from modelswarm.local.swarm_door import SwarmDoor, server_name

KILLS = 50
PROMPT, NEW, KILL_AT = 1000, 60, 20
REPLACE_SECONDS = 60.0


def run() -> Result:
    gaps: list[float] = []
    lost = doubled = 0
    rng = random.Random(7)
    with swarm_of(model_folder("27m"), spans=2, replicas=2, max_length=1200) as swarm:
        door, view = Door(swarm.grpc), SwarmDoor(swarm.grpc)
        for number in range(KILLS):
            prompt = [rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)]
            calm = door.stream(prompt, NEW)
            stream, gap = killed_stream(swarm, door, view, prompt, hop=number % 2)
            gaps.append(gap)
            gone, again = differences(calm, stream)
            lost, doubled = lost + gone, doubled + again
    return Result(
        name="gap_after_kill",
        figures={
            "p50_s": quantile(gaps, 0.5),
            "p99_s": quantile(gaps, 0.99),
            "max_s": max(gaps),
            "lost": lost,
            "doubled": doubled,
        },
        columns=("kills", "p50 s", "p99 s", "max s", "lost", "doubled"),
        rows=[
            (
                str(KILLS),
                f"{quantile(gaps, 0.5):.3f}",
                f"{quantile(gaps, 0.99):.3f}",
                f"{max(gaps):.3f}",
                str(lost),
                str(doubled),
            )
        ],
        shape="Llama 27M fp32, 2 spans x 2 servers, prompt 1000, only the lost span is rebuilt",
        threads=1,
        bars=[Bar("lost", "<=", 0), Bar("doubled", "<=", 0)],
    )


def killed_stream(
    swarm: LocalSwarm, door: Door, view: SwarmDoor, prompt: list[int], hop: int
) -> tuple[Streamed, float]:
    """The stream, and the seconds from the kill to the next token that was not on its way already."""
    recorder = Recorder()
    killed_at = 0.0
    victim = None
    for part in door.parts(prompt, NEW):
        recorder.add(part)
        if victim is None and len(recorder.tokens) >= KILL_AT:
            victim = swarm.kill(server_name(view.running_route()[hop].peer))
            killed_at = time.perf_counter()
    if victim is None:
        raise RuntimeError("the stream ended before the kill")
    if not swarm.wait_replaced(victim.name, victim.incarnation, REPLACE_SECONDS):
        raise RuntimeError(f"{victim.name} was not replaced")
    after = [b - max(a, killed_at) for a, b in pairwise(recorder.times) if b > killed_at]
    return recorder.streamed(), max(after)


def differences(calm: Streamed, killed: Streamed) -> tuple[int, int]:
    """(lost, doubled): positions that did not come, or with another token; positions that came again."""
    wanted = dict(zip(calm.positions, calm.tokens, strict=True))
    came = dict(zip(killed.positions, killed.tokens, strict=True))
    lost = sum(came.get(position) != token for position, token in wanted.items())
    return lost, len(killed.positions) - len(came)
