"""The sessions of a beam search: one for each beam, which forks, is rewound and goes on by one token in each step.

A step is a turn of one token, whose most probable tokens the servers report. So each beam recovers as any session does.
Knows no scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelswarm.protocol.beam_forks import Source, choose_sources
from modelswarm.protocol.messages import PromptLogprob
from modelswarm_gateway.backend.beams.scorer import ScoredToken
from modelswarm_gateway.backend.protocol import TurnBackend
from modelswarm_gateway.backend.token_stream import TokenEvent, TokenStream
from modelswarm_gateway.core.interface.turn import Reservation, TokenLogprobs, TurnRequest
from modelswarm_gateway.errors import ApiError, Code

STEP_SECONDS = 5.0  # of one wait for a step, which has no end of its own: a session may be held
TTL_SECONDS = 60  # for which the servers keep a beam's session without a turn


@dataclass(slots=True)
class _Lane:
    session: str
    log: tuple[int, ...] = ()  # of the session


class BeamSessions:
    def __init__(
        self, backend: TurnBackend, model: str, turn: TurnRequest, count: int, longest: int
    ) -> None:
        """Steps begin with `turn`, the prompt's. `count`: best tokens to report. `longest`: entries of an answer."""
        self._backend, self._model = backend, model
        sampling = replace(turn.sampling, temperature=0.0, logprobs=count, eos=())
        whole = Reservation(longest, TTL_SECONDS)
        self._first = replace(turn, max_tokens=1, sampling=sampling, reservation=whole)
        unscored = replace(sampling, prompt_logprobs=-1)
        self._later = replace(self._first, sampling=unscored, is_resumed=True)
        self._lanes: list[_Lane] = []
        self.prompt_logprobs: list[PromptLogprob] = []
        self.reroutes = self.replayed = 0  # of all steps: faults, and entries that ran again

    @property
    def sessions(self) -> list[str]:
        return [lane.session for lane in self._lanes]

    def close(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            self._backend.close_session(lane.session)

    async def next_tokens(self, logs: Sequence[tuple[int, ...]]) -> list[list[ScoredToken]]:
        """Return the most probable tokens behind each log, best first. Raise ApiError or CoreError."""
        before = list(self._lanes)
        sources = choose_sources([lane.log for lane in before], logs)
        # Forks first: a turn of the parent would end the copies of its KV (R15, forks).
        events = await self._run_forks(sources, logs, before)
        turns: dict[int, tuple[_Lane, TokenStream]] = {}
        for place, source in enumerate(sources):
            if place not in events:
                lane = self._open_lane() if source.session is None else before[source.session]
                turns[place] = lane, self._start_turn(lane, logs[place])
        for place, (lane, stream) in turns.items():
            events[place] = await self._await_step(lane, stream)
            lane.log = (*logs[place], events[place].token)
            if not self.prompt_logprobs:
                self.prompt_logprobs = list(stream.prompt_logprobs)
        return [_scored(events[place]) for place in range(len(logs))]

    async def _run_forks(
        self, sources: Sequence[Source], logs: Sequence[tuple[int, ...]], before: Sequence[_Lane]
    ) -> dict[int, TokenEvent]:
        """Run the step of each log that needs a fork, and close the session that it replaces.

        A log whose fork finds no room is left out if it has a session of its own, which can be rewound.
        """
        forks: dict[int, tuple[_Lane, TokenStream]] = {}
        for place, source in enumerate(sources):
            if source.parent is not None:
                lane = self._open_lane()
                parent = before[source.parent].session
                turn = replace(self._later, tokens=logs[place], is_resumed=False, parent=parent)
                forks[place] = lane, self._backend.start_turn(lane.session, turn)
        events: dict[int, TokenEvent] = {}
        replaced: list[_Lane] = []
        for place, (lane, stream) in forks.items():
            own = sources[place].session
            try:
                events[place] = await self._await_step(lane, stream)
            except ApiError as error:
                if own is None or error.code is not Code.NO_CAPACITY:
                    raise
                self._close_lane(lane)
                continue
            lane.log = (*logs[place], events[place].token)
            replaced += [] if own is None else [before[own]]
        for lane in replaced:
            self._close_lane(lane)
        return events

    def _start_turn(self, lane: _Lane, log: tuple[int, ...]) -> TokenStream:
        # Only the first turn of a session may be refused: it reserves the room of the whole answer.
        turn = self._later if lane.log else self._first
        return self._backend.start_turn(lane.session, replace(turn, tokens=log))

    async def _await_step(self, lane: _Lane, stream: TokenStream) -> TokenEvent:
        event = await _first_token(stream)
        view = self._backend.session(lane.session)
        self.reroutes += stream.reroutes
        self.replayed += view.replayed if view else 0
        return event

    def _open_lane(self) -> _Lane:
        lane = _Lane(self._backend.open_session(self._model))
        self._lanes.append(lane)
        return lane

    def _close_lane(self, lane: _Lane) -> None:
        self._lanes.remove(lane)
        self._backend.close_session(lane.session)


async def _first_token(stream: TokenStream) -> TokenEvent:
    while True:
        for event in await stream.next_events(STEP_SECONDS):
            assert isinstance(event, TokenEvent)  # beams return no rows
            return event


def _scored(event: TokenEvent) -> list[ScoredToken]:
    return [ScoredToken(each.token, TokenLogprobs(each.logprob, event.top)) for each in event.top]
