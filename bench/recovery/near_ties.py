"""Near ties in runs with kills: tokens whose margin is so small that a rebuilt KV page could change them.

Eight streams at a time (greedy, sampled, filtered, penalised) run through 4 spans x 2 servers of a small transformer.
Two servers are killed during each eight. The log of each client is then run through the whole model in one piece. Of
the `tokens` checked, `count` have a margin below TAU, and `flips` of these differ. An answer with a differing token
that is no near tie is `wrong`, one with a lost or doubled token is `incomplete`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness import Bar, Result

if TYPE_CHECKING:
    from support.processes.streams import Answer, Request
    from transformers import PreTrainedModel

ROUNDS, NEW, KILL_AT = 12, 160, 15
KILLS_PER_ROUND = 2


@dataclass(slots=True)
class OracleCounts:
    flips: int = 0
    wrong: int = 0
    incomplete: int = 0


def run() -> Result:
    from support.models.tiny_models import JUDGED, make_toy
    from support.processes.oracles import TAU

    counts = OracleCounts()
    with tempfile.TemporaryDirectory() as folder:
        toy = make_toy(Path(folder))
        tried = run_with_kills(toy, counts)
    return Result(
        name="near_ties",
        figures={
            "count": JUDGED.near_ties,
            "tokens": JUDGED.tokens,
            "flips": counts.flips,
            "wrong": counts.wrong,
            "incomplete": counts.incomplete,
        },
        columns=("kills", "answers", "tokens", "near ties", "flips", "wrong", "incomplete"),
        rows=[
            tuple(
                str(number)
                for number in (
                    KILLS_PER_ROUND * ROUNDS,
                    tried,
                    JUDGED.tokens,
                    JUDGED.near_ties,
                    counts.flips,
                    counts.wrong,
                    counts.incomplete,
                )
            )
        ],
        shape=f"Llama of 8 blocks, hidden 128, fp32, 4 spans x 2 servers; near: below {TAU:g} in logits",
        threads=1,
        bars=[Bar("wrong", "<=", 0), Bar("incomplete", "<=", 0)],
    )


def run_with_kills(toy: Path, counts: OracleCounts) -> int:
    """Run all rounds and check every answer; return the number of answers."""
    import torch
    from support.models.tiny_models import load_whole
    from support.processes import kill_scenarios
    from support.processes.swarm import local_settings, running_swarm

    torch.set_num_threads(1)
    model = load_whole(toy)
    settings = local_settings("near-ties", token_budget=16)
    tried = 0
    with running_swarm(toy, "near-ties", spans=4, replicas=2, settings=settings) as running:
        for number in range(ROUNDS):
            place = number % (kill_scenarios.TAIL + 1)
            for answer in kill_scenarios.kill_under_many(
                running, make_requests(number), place, KILL_AT
            ):
                count_answer(model, answer, counts)
                tried += 1
    return tried


def make_requests(number: int) -> Sequence[Request]:
    """Return eight requests, different in every round."""
    from support.models.tiny_models import VOCAB
    from support.processes.kill_scenarios import SAMPLED, prompt_of
    from support.processes.streams import Request

    from modelswarm.protocol.messages import Sampling

    first = 1000 * (number + 1)
    ways = [
        Sampling(),
        Sampling(),
        Sampling(repetition_penalty=1.3),
        SAMPLED,
        Sampling(temperature=0.7, seed=first),
        Sampling(temperature=1.0, top_p=0.9, seed=first + 1),
        Sampling(temperature=1.3, min_p=0.05, seed=first + 2),
        Sampling(temperature=0.9, top_k=20, repetition_penalty=1.1, seed=first + 3),
    ]
    lengths = (5, 333, 64, 150, 31, 200, 90, 17)
    return [
        Request(prompt_of(length, first + index, VOCAB), NEW, way)
        for index, (length, way) in enumerate(zip(lengths, ways, strict=True))
    ]


def count_answer(model: PreTrainedModel, answer: Answer, counts: OracleCounts) -> None:
    from support.processes.oracles import check_contiguous, check_tokens

    try:
        check_contiguous(answer)
    except AssertionError:
        counts.incomplete += 1
        return
    try:
        counts.flips += check_tokens(model, answer)
    except AssertionError as error:
        print(f"near_ties: {error}")
        counts.wrong += 1
