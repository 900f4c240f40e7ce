"""The requests of clients during faults: greedy, sampled, penalties, stop strings, turns of one session.

A script is the turns of one conversation, in order; most have one. Every request has a twin: its answer before the
first fault, which is known to be right. Used by `clients.py` (which plays scripts) and `oracle.py` (which compares).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from support.models.tiny_models import VOCAB
from support.processes.kill_scenarios import prompt_of
from support.processes.streams import Answer, Request

from modelswarm.protocol.messages import Sampling

Calm: TypeAlias = Callable[[Request], Answer]
"""Sends a request without faults and checks the answer."""

GREEDY = Sampling()
PENALISED = Sampling(repetition_penalty=1.3)
SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=1234)
MIN_P = Sampling(temperature=1.3, min_p=0.05, seed=6)
WARM = Sampling(temperature=0.7, seed=5)


@dataclass(frozen=True, slots=True)
class Script:
    """The requests have no session's name. The client that plays a script with several requests adds one."""

    requests: tuple[Request, ...]
    twins: tuple[Answer, ...]


def scripts_of(calm: Calm, seed: int, new: int) -> list[Script]:
    """Answers run to about `new` tokens."""
    rng = random.Random(seed)
    kinds = (GREEDY, PENALISED, SAMPLED, MIN_P, WARM)
    lengths = (1, 40, 90, 200, 400)
    plain = [
        Request(
            prompt_of(length, rng.randrange(1 << 30), VOCAB), new + rng.randrange(new), sampling
        )
        for sampling, length in zip(kinds, rng.sample(lengths, len(lengths)), strict=True)
    ]
    made = [_one(calm, request) for request in plain]
    stops = [(script.requests[0], _stop_in(script.twins[0].text)) for script in made]
    made += [_one(calm, replace(request, stop=(stop,))) for request, stop in stops[1:] if stop][:2]
    return [*made, _talk(calm, rng, new, SAMPLED), _talk(calm, rng, new, PENALISED)]


def _one(calm: Calm, request: Request) -> Script:
    return Script((request,), (calm(request),))


def _stop_in(text: str) -> str:
    """Return a character whose first occurrence is late in the text; "" if there is none."""
    late = range(len(text) // 3, len(text))
    found = (text[i] for i in late if text[i] not in text[:i])
    return next((char for char in found if char.isascii() and char.isprintable()), "")


def _talk(calm: Calm, rng: random.Random, new: int, sampling: Sampling) -> Script:
    """Return three turns: the second extends the log, the third rewinds it and differs."""
    first = Request(
        prompt_of(rng.randrange(20, 80), rng.randrange(1 << 30), VOCAB), new // 2, sampling
    )
    one = calm(first)
    second = replace(first, prompt=(*one.log, *_more(rng)))
    two = calm(second)
    back = two.log[: rng.randrange(10, len(one.log))]
    third = replace(first, prompt=(*back, *_more(rng)))
    return Script((first, second, third), (one, two, calm(third)))


def _more(rng: random.Random) -> Sequence[int]:
    return prompt_of(rng.randrange(5, 30), rng.randrange(1 << 30), VOCAB)
