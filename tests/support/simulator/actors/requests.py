"""The requests of a client: its turns, drawn from its seed, and the forks of its sessions.

`client.py` uses them. The draws of rows have a generator of their own (`client_rows.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from support.simulator.actors.server_process import GRAMMARS, Tools

from modelswarm.protocol.messages import MAX_FORCED_TOKENS, Grammar, Sampling
from modelswarm_gateway.core.interface.turn import Reservation, TurnRequest

OPENING = TurnRequest((0,), 0, Sampling(), begin=0)
"""The first turn of a session that is opened with a reservation: its one entry only holds the place."""


def draw_reservation(tools: Tools, name: str) -> Reservation | None:
    """Return what the session of a client reserves; None: only the positions of its turns."""
    scenario = tools.scenario
    rng, most = random.Random(f"reserve/{scenario.seed}/{name}"), scenario.layout.max_length
    if not scenario.load.reserves or rng.random() < 1 / 3:
        return None
    return Reservation(rng.randint(most // 2, most), ttl=60)


class RequestDraws:
    """Draws the turns of one client; `rng` is the client's own."""

    def __init__(self, tools: Tools, rng: random.Random, is_slow: bool) -> None:
        self._load = tools.scenario.load
        self._vocab = tools.scenario.vocab
        self._rng = rng
        self._is_slow = is_slow

    def draw_turn(self, before: Sequence[int], turns_left: int, max_length: int) -> TurnRequest:
        """Return a turn that continues the log `before`, or a part of it, to at most `max_length` entries."""
        rng, load = self._rng, self._load
        log = list(before)
        if log and rng.random() < load.rewind_chance:
            del log[rng.randrange(len(log)) :]
        fresh = rng.randint(*load.prompt) if not before else rng.randint(0, 4)
        log += [rng.randrange(self._vocab) for _ in range(fresh)]
        if not log:
            log = [rng.randrange(self._vocab)]
        del log[max_length - 1 :]
        ahead = rng.randint(1, 4) if self._is_slow else rng.choice((1, 8, 64))
        room = max_length - len(log)
        has_no_limit = rng.random() < load.no_limit_chance
        most = None if has_no_limit else min(room, rng.randint(*load.max_tokens))
        scored = 1 if turns_left % 3 == 0 else -1
        sampling = replace(self._draw_sampling(turns_left), prompt_logprobs=scored)
        return TurnRequest(
            tokens=tuple(log),
            max_tokens=most,
            sampling=self._add_grammar(sampling) if load.has_grammars else sampling,
            credit_ahead=ahead,
        )

    def _draw_sampling(self, turns_left: int) -> Sampling:
        rng, load = self._rng, self._load
        eos: tuple[int, ...] = ()
        if rng.random() < load.eos_chance:
            eos = tuple(rng.randrange(self._vocab) for _ in range(self._vocab // 12))
        if rng.random() < load.sampled_chance:
            drawn = Sampling(
                temperature=1.0,
                seed=rng.getrandbits(64),
                repetition_penalty=rng.choice((1.0, 1.2)),
                eos=eos,
                logprobs=len(eos) % 3,
            )
            return self._add_rules(drawn) if load.has_rules else drawn
        return Sampling(eos=eos, logprobs=turns_left % 3)

    def _add_rules(self, sampling: Sampling) -> Sampling:
        """Return the parameters with penalties, a bias and masks, which follow from their seed."""
        vocab, seed = self._vocab, sampling.seed
        return replace(
            sampling,
            presence_penalty=0.5,
            frequency_penalty=seed % 4 / 4,
            logit_bias=((seed % vocab, -1.5),),
            bad_words=((1,), (2, 3)),
            min_tokens=seed % 5,
            logprobs=seed % 3,
            allowed_tokens=tuple(range(seed % 2, vocab, 2)) if seed % 7 == 0 else (),
        )

    def _add_grammar(self, sampling: Sampling) -> Sampling:
        """Return the parameters of two of three turns with a grammar, as a gateway would send it."""
        kind = self._rng.randrange(3)
        if not kind:
            return sampling
        most = 0 if sampling.logprobs else self._rng.choice((1, 4, MAX_FORCED_TOKENS))
        return replace(sampling, grammar=Grammar(f"grammar {kind}", GRAMMARS, most))


class Forks:
    """The forks of one client's sessions (R15): their first requests, with draws of their own."""

    def __init__(self, tools: Tools, name: str) -> None:
        self._chance = tools.scenario.load.fork_chance
        self._vocab = tools.scenario.vocab
        self._rng = random.Random(f"forks/{tools.scenario.seed}/{name}")
        self._name, self._count = name, 0
        self.requests: list[TurnRequest] = []  # of forks that have not begun

    def on_token(
        self,
        request: TurnRequest,
        log: Sequence[int],
        max_length: int,
        reservation: Reservation | None,
    ) -> None:
        """Perhaps fork the session: another answer to its prompt, or a part of its log and other entries after it.

        A fork has the reservation of its parent.
        """
        rng = self._rng
        if not self._chance or rng.random() >= self._chance:
            return
        self._count += 1
        kept = len(request.tokens)
        if rng.random() < 0.5:
            kept = rng.randint(1, len(log))
        fresh = 0 if rng.random() < 0.5 else rng.randint(1, 4)
        tokens = (*log[:kept], *(rng.randrange(self._vocab) for _ in range(fresh)))
        tokens = tokens[: max_length - 1]
        room = max_length - len(tokens)
        sampling = replace(request.sampling, choice=self._count)
        most = min(room, rng.randint(0, 12))
        self.requests.append(
            TurnRequest(tokens, most, sampling, parent=self._name, reservation=reservation)
        )
