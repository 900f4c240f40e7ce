"""One beam search as a backend of turns: each of its turns gets the tokens of one of the best answers, at the end.

Made by the service for each prompt. So an answer is detokenized, scored and reported as any other. Knows no texts.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from typing_extensions import override

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Finish
from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.backend.beams.scorer import Beam, BeamScorer, tokens_per_beam
from modelswarm_gateway.backend.beams.sessions import BeamSessions
from modelswarm_gateway.backend.protocol import TurnBackend
from modelswarm_gateway.backend.token_stream import TokenEvent, TokenStream
from modelswarm_gateway.core.interface.errors import CoreError
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.core.interface.views import SessionView
from modelswarm_gateway.errors import ApiError, from_core


class BeamSearch(TurnBackend):
    """The turns of one prompt: the answer with `sampling.choice` i is the i-th best."""

    def __init__(
        self, backend: TurnBackend, options: BeamOptions, longest: int, prompt_field: str
    ) -> None:
        """`longest`: entries of a whole answer, with the prompt."""
        self._backend, self._options, self._longest = backend, options, longest
        self._prompt_field = prompt_field
        self._model = ""
        self._opened = 0
        self._turns: dict[str, tuple[int, TokenStream]] = {}
        self._sessions: BeamSessions | None = None
        self._task: asyncio.Task[None] | None = None
        self._failed: SessionView | None = None  # all beams of a search that has failed
        self._answers: list[Beam] = []  # best first, at the end
        self._prompt_length = 0

    @override
    def open_session(self, model: str, name: str = "", epoch_floor: int = 0) -> str:
        self._model = model
        self._opened += 1
        return f"answer {self._opened}"

    @override
    def start_turn(self, session: str, request: TurnRequest) -> TokenStream:
        """Return the stream of one answer. The first turn starts the search, and so does one after a refusal."""
        stream = TokenStream(lambda _: None, lambda _: None)
        self._turns[session] = request.sampling.choice, stream
        if self._answers:
            self._fill(request.sampling.choice, stream)
        elif self._task is None or self._task.done():
            self._begin(request)
        return stream

    @override
    def session(self, session: str) -> SessionView | None:
        """Return the state of the first beam's session, or of a session that is none of this search.

        Each step reuses the prompt that the search itself has computed: no earlier turn had it. The first answer counts
        what ran again for all beams.
        """
        if session not in self._turns:
            return self._backend.session(session)
        beams = self._sessions
        found = beams.sessions if beams else ()
        view = self._failed or (self._backend.session(found[0]) if found else None)
        if view is None or beams is None:
            return view
        is_first = self._turns[session][0] == 0
        return replace(view, reused=0, replayed=beams.replayed if is_first else 0)

    @override
    def close_session(self, session: str) -> None:
        self._turns.pop(session, None)
        if not self._turns:
            self._end()

    @override
    def park_session(self, session: str) -> None:
        raise AssertionError("an answer of a beam search has no name")

    @override
    def truncate_log(self, session: str, length: int) -> None:
        raise AssertionError("an answer of a beam search is not resumed")

    def _begin(self, request: TurnRequest) -> None:
        """Start the search. Raise CoreError if the prompt is refused at once."""
        self._end()
        self._failed = None
        self._prompt_length = len(request.tokens)
        ends = request.sampling.eos
        count = max(tokens_per_beam(self._options, ends), request.sampling.logprobs)
        turn = TurnRequest(
            request.tokens, 1, request.sampling, request.credit_ahead, opaque=request.opaque
        )
        self._sessions = BeamSessions(self._backend, self._model, turn, count, self._longest)
        self._scorer = BeamScorer(self._options, ends, self._longest - len(request.tokens))
        self._ends, self._top = ends, request.sampling.logprobs
        self._task = asyncio.create_task(self._run(request.tokens))

    async def _run(self, prompt: tuple[int, ...]) -> None:
        assert self._sessions is not None
        scorer = self._scorer
        try:
            while not scorer.is_done:
                logs = [(*prompt, *beam.ids) for beam in scorer.running]
                scorer.add_step(await self._sessions.next_tokens(logs))
        except (ApiError, CoreError) as error:
            failure = error if isinstance(error, ApiError) else from_core(error, self._prompt_field)
            self._failed = self._view_beams(self._sessions)
            self._sessions.close()
            for choice, stream in self._turns.values():
                if choice == 0:  # whose reader may try again, for all answers, or ends them
                    stream.fail(failure)
            return
        self._answers = scorer.finished
        for choice, stream in self._turns.values():
            self._fill(choice, stream)

    def _view_beams(self, beams: BeamSessions) -> SessionView | None:
        """Return one view of all beams: the room that they want, and every server that had none for one of them."""
        views = [view for name in beams.sessions if (view := self._backend.session(name))]
        if not views:
            return None
        wanted = self._options.num_beams * views[0].wanted_positions
        crowded = frozenset[PeerId]().union(*(view.crowded_servers for view in views))
        return replace(views[0], wanted_positions=wanted, crowded_servers=crowded)

    def _fill(self, choice: int, stream: TokenStream) -> None:
        """Put the whole answer into its stream."""
        assert self._sessions is not None
        stream.prompt_logprobs = self._sessions.prompt_logprobs
        stream.reroutes = self._sessions.reroutes
        tokens = self._answers[choice].tokens
        for place, each in enumerate(tokens):
            is_last = place == len(tokens) - 1
            end = Finish.STOP if each.token in self._ends else Finish.LENGTH
            stream.add_event(
                TokenEvent(
                    self._prompt_length + place,
                    each.token,
                    end if is_last else Finish.NONE,
                    each.logprob.logprob,
                    each.logprob.top[: self._top],
                )
            )

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._sessions is not None:
            self._sessions.close()
