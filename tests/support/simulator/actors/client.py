"""A client of the simulated swarm: one session with its turns, and the oracle for the tokens that it receives.

It prompts, reads (perhaps slowly), stops, rewinds, appends and closes as its seed says, through the interface of the
gateway core. Each token must equal the reference's, each position comes once and in order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from support.simulator.actors.broken_stream import LeftTurn, resume_request, turn_begin
from support.simulator.actors.client_rows import ClientRows, rows_from
from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.actors.requests import OPENING, Forks, RequestDraws, draw_reservation
from support.simulator.actors.server_process import MODEL, ROW_BYTES, Tools
from support.simulator.oracles import Reference
from support.simulator.scenario import NEVER
from support.simulator.trace import Violation

from modelswarm.protocol.input_log import common_prefix_length
from modelswarm.protocol.messages import Finish, Sampling
from modelswarm_gateway.core.interface.effects import (
    Effect,
    Emitted,
    MigrationEnded,
    PromptScored,
    Refused,
    Rerouted,
    RowsReturned,
    SessionLost,
)
from modelswarm_gateway.core.interface.errors import SessionBusy
from modelswarm_gateway.core.interface.turn import ParkedTurn, TokenLogprobs, TurnRequest
from modelswarm_gateway.core.sessions.epoch_counters import lowest_epoch

AWAY_CHANCE = 0.03  # of a broken stream, for each token that a client gets


@dataclass(slots=True)
class Progress:
    """The running turn."""

    request: TurnRequest
    end: int  # length of the log at which the turn ends with LENGTH
    stop_at: int | None  # length of the log at which a stop string matches
    close_at: int | None  # length of the log at which the client closes the session


class Client:
    def __init__(self, tools: Tools, gateway: GatewayProcess, name: str) -> None:
        self._tools = tools
        self.gateway = gateway
        self._load = tools.scenario.load
        self._rng = random.Random(f"client/{tools.scenario.seed}/{name}")
        self.rows = ClientRows(tools, name)
        self._reference = Reference(tools.scenario, self.rows.blocks)
        self.name = name
        self.log: list[int] = []
        self.turn: Progress | None = None
        self.turns_left = self._rng.randint(1, self._load.turns)
        self.done = False
        self.tokens = 0
        self.returned = 0  # rows
        self.resumed = 0  # turns
        self.progress_at = 0.0  # time of the last progress
        self.token_at = 0.0  # time of the last token
        self.served_at = 0.0  # time of the last token, read or end of a turn; no refusal
        self._is_pending = (
            False  # a request was refused, or its gateway is lost, and it is not yet repeated
        )
        self._read = 0
        self._scored = 0  # entries of the prompt below this have their log probabilities
        self._reading = False
        self._slow = self._rng.random() < self._load.slow_reader_chance
        self._reroutes = 0  # in this turn
        self._overdues = 0  # overdue tokens since the last token
        self.has_token = False  # of this turn, or of the last one
        self._previous_log: list[int] = []  # the log at the end of the turn before
        self._serial = 0  # raised by every turn: timers of older turns are void
        self._next_request: TurnRequest | None = None  # of a client that left a turn and returns
        self._kept_sampling: Sampling | None = None  # of the turn that is resumed
        self._is_away = False  # its stream broke, and its gateway has not noticed
        self._away_rng = random.Random(f"away/{tools.scenario.seed}/{name}")
        self._forks = Forks(tools, name)
        self.reservation = draw_reservation(tools, name)
        self._draws = RequestDraws(tools, self._rng, self._slow)

    @property
    def is_waiting(self) -> bool:
        """True if a turn runs, or a request for one waits to be repeated."""
        return not self.done and (self.turn is not None or self._is_pending)

    @property
    def _max_length(self) -> int:
        whole = self.reservation
        return self._tools.scenario.layout.max_length if whole is None else whole.max_length

    def take_forks(self) -> list[TurnRequest]:
        """Return the first requests of the sessions that this one was forked to since the last call."""
        forks, self._forks.requests = self._forks.requests, []
        return forks

    # -- actions ---------------------------------------------------------------------------

    def start(self, request: TurnRequest | None = None) -> None:
        """Open the session. `request`: its first turn, if it is a fork."""
        if self.done or self._serial:
            return
        if request is not None:
            self.reservation = request.reservation
        elif self.reservation is not None:
            request = OPENING
        self._next_request = request
        now = self._tools.clock.now
        above = lowest_epoch(0, now) if self._tools.scenario.can_take_over else None
        self.gateway.core.open_session(self.name, MODEL, now, above)
        self._next_turn()

    def _next_turn(self) -> None:
        if self.done:
            return
        if self._next_request is not None:
            request, self._next_request = self._next_request, None
            self._begin(request)
            return
        if self.turns_left == 0:
            self.close()
            return
        self.turns_left -= 1
        log = [] if self.reservation and tuple(self.log) == OPENING.tokens else self.log
        request = self._draws.draw_turn(log, self.turns_left, self._max_length)
        self._begin(self.rows.add(request, common_prefix_length(self.log, request.tokens)))

    def _begin(self, request: TurnRequest) -> None:
        if self.done:
            return
        request = self.rows.complete(request)
        rng, load, length = self._rng, self._load, len(request.tokens)
        if load.resumes_turns:
            request = replace(request, keeps_logprobs=request.sampling.logprobs > 0)
        limit = request.max_tokens
        stop = close = None
        if limit is None:
            limit = self._max_length - length
            stop = length + min(limit, rng.randint(*load.max_tokens) + 1)
        elif limit and rng.random() < load.stop_chance:
            stop = length + rng.randint(1, limit)
        if limit and rng.random() < load.close_chance:
            close = length + rng.randint(0, limit)
        self.turn, self._is_pending = Progress(request, length + limit, stop, close), False
        if self.has_token:
            self._previous_log = list(self.log)
        else:  # the turn before may have rewound the log
            kept = common_prefix_length(self._previous_log, self.log)
            self._previous_log = self._previous_log[:kept]
        self.log, self.has_token = list(request.tokens), request.is_resumed
        self._read, self._reroutes = length, 0
        if request.sampling.returned is not None:
            self._read = self.rows.next
        wants_scores = request.sampling.prompt_logprobs >= 0 and not request.is_resumed
        self._scored = 1 if wants_scores else length
        self._serial += 1
        self._is_away = False
        self._note("turn", f"{length} entries, at most {limit} more, {request.sampling.seed}")
        first = self._start_turn(request)
        self._expect(first == length, f"start_turn() returned position {first} instead of {length}")
        self._record_progress()
        self.gateway.pump()
        if close == length:
            self.gateway.later(rng.uniform(0, 0.05), self._close_if_current, self._serial)

    def left_turn(self) -> LeftTurn | None:
        """Return the running turn, if its stream can be resumed."""
        turn = self.turn
        if turn is None or not self._load.resumes_turns or turn.request.max_tokens == 0:
            return None
        return LeftTurn(turn.request, turn.end, tuple(self.log))

    def read_log(self) -> tuple[int, ...]:
        """Return the log of a running turn that generates nothing; empty if there is none."""
        request = None if self.turn is None else self.turn.request
        return () if request is None or request.max_tokens != 0 else request.tokens

    def resume(self, left: LeftTurn, kept: ParkedTurn) -> None:
        """Let the next turn go on behind what is kept of a broken one. Entries that were not seen must be right."""
        request, sampling = resume_request(left, kept), left.request.sampling
        if request is None:
            return
        self._expect(kept.turn.end == left.end, f"{kept.turn} should end at {left.end}")
        for at in range(len(left.received), len(request.tokens)):
            log = request.tokens[:at]
            expected = self._reference.next_token(log, sampling, left.begin)
            found = request.tokens[at]
            self._expect(found == expected.token, f"{found} is kept at {at}, not {expected}")
            logprobs = TokenLogprobs(expected.logprob, expected.top)
            kept_logprobs = kept.logprobs.get(at, logprobs)
            self._expect(kept_logprobs == logprobs, f"{kept_logprobs} at {at}, not {expected}")
        self.log, self.has_token = list(request.tokens), True
        if request.max_tokens:
            self.resumed += 1
            self._kept_sampling = request.sampling
            self._next_request = replace(request, sampling=sampling)

    def _break_stream(self) -> None:
        """Lose the connection. The gateway notices it later, and the client comes back."""
        self._note("breaks its stream")
        self._is_away = True
        self.gateway.later(self._away_rng.uniform(0.0, 0.05), self._return, self._serial)

    def _return(self, serial: int) -> None:
        left = self.left_turn()
        if serial != self._serial or self.done or left is None:
            return
        core = self.gateway.core
        self.turn, self._is_pending, self._is_away, self._reading = None, True, False, False
        core.cancel_turn(self.name, self._tools.clock.now)
        kept = core.parked_turn(self.name)
        if kept is not None:
            self.resume(left, kept)
        self.schedule_next_turn()
        self.gateway.pump()

    def _start_turn(self, request: TurnRequest) -> int:
        """Start the turn in the core. A session whose turn has ended must not be busy."""
        kept = self.gateway.core.parked_turn(self.name)
        if kept is None and self.reservation is not None:  # the session is new there
            request = replace(request, reservation=self.reservation)
        if self.rows.are_used:  # the gateway has the rows of the log that it keeps
            known = 0 if kept is None else common_prefix_length(kept.tokens, request.tokens)
            request = replace(request, opaque=rows_from(request.tokens, known))
        if request.is_resumed and self._kept_sampling is not None:
            request = replace(request, sampling=self._kept_sampling)
        try:
            return self.gateway.core.start_turn(self.name, request, self._tools.clock.now)
        except SessionBusy as error:
            detail = f"{self.name}: the turn has ended, and the next one is refused: {error}"
            raise Violation(detail, self.name) from error

    def _close_if_current(self, serial: int) -> None:
        if serial == self._serial and not self.done:
            self.close()

    def close(self) -> None:
        self._note("closes")
        self.abandon()
        self.gateway.core.close_session(self.name, self._tools.clock.now)
        self.gateway.pump()

    def abandon(self) -> None:
        """End without closing, because the gateway was killed and the session is lost."""
        self.done, self.served_at = True, self._tools.clock.now
        self.turn = None
        self._serial += 1

    def received_log(self) -> list[int]:
        """Return the log that the client has received: a takeover must not lose any of it."""
        return list(self.log) if self.has_token else self._previous_log

    def forget_received_log(self) -> None:
        """A new session of the name begins: no server has anything of the log before its first token."""
        self.has_token, self._previous_log = False, []

    def move_to(self, gateway: GatewayProcess) -> None:
        """Continue at this gateway, because the former one is gone."""
        self.gateway = gateway
        self.turn, self._is_pending, self._is_away = None, True, False
        self._serial += 1
        self._reading = False

    def leave_turn(self, rng: random.Random) -> None:
        """Leave the turn. The next one has the same prompt, an edited one, or another one."""
        assert self.turn is not None
        request, vocab = self.turn.request, self._tools.scenario.vocab
        kept = rng.choice((len(request.tokens), rng.randrange(len(request.tokens)), 0))
        tokens = request.tokens[:kept]
        if kept < len(request.tokens):
            tokens += tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 6)))
        self._next_request = replace(request, tokens=tokens)

    def schedule_next_turn(self) -> None:
        self._serial += 1
        self.gateway.later(0.0, self._next, self._serial)

    def _next(self, serial: int) -> None:
        if serial == self._serial:
            self._next_turn()

    def _read_on(self, serial: int) -> None:
        """Read one more entry, as a slow reader."""
        if serial != self._serial or self.turn is None:
            self._reading = False
            return
        self._read += 1
        self._record_progress()
        self.served_at = self._tools.clock.now
        self.gateway.core.on_read(self.name, self._read, self._tools.clock.now)
        self._schedule_read()
        self.gateway.pump()

    def _schedule_read(self) -> None:
        self._reading = self._read < self._received
        if self._reading:
            pause = self._rng.expovariate(1 / self._load.read_seconds)
            self.gateway.later(pause, self._read_on, self._serial)

    # -- effects ---------------------------------------------------------------------------

    def on_effects(self, effects: list[Effect]) -> None:
        """Handle simultaneous effects of the session in order. After a stop or a close the rest is ignored."""
        for effect in effects:
            if self._is_away:  # it gets nothing
                if isinstance(effect, SessionLost):
                    self._on_session_lost(effect)
            elif isinstance(effect, Emitted):
                if not self._on_token(effect):
                    return
            elif isinstance(effect, PromptScored):
                self._check_scores(effect)
            elif isinstance(effect, RowsReturned):
                self._on_rows(effect)
            elif isinstance(effect, Refused):
                self._on_refusal(effect)
            elif isinstance(effect, Rerouted | MigrationEnded):
                self._reroutes += 1
                self._count_overdue(effect)
            elif isinstance(effect, SessionLost):
                self._on_session_lost(effect)

    def _on_token(self, seen: Emitted) -> bool:
        turn = self.turn
        assert turn is not None or self._expect(False, f"{seen} while no turn runs")
        assert turn is not None
        self._expect(seen.position == len(self.log), f"{seen}, but the log has {len(self.log)}")
        self._record_progress()
        length = len(turn.request.tokens)
        self._expect(self._scored == length, f"{seen}, but {self._scored} of {length} are scored")
        if turn.request.sampling.returned is not None:
            self._expect(self.rows.next == seen.position, f"{seen}, but not row {self.rows.next}")
        if seen.token == -1:
            self._expect(turn.end == len(self.log), f"{seen}, but tokens were asked for")
            self._expect(seen.finish is Finish.LENGTH, f"{seen} does not finish")
            self._end_turn()
            return True
        self._expect(seen.position < turn.end, f"{seen} is beyond the turn's end {turn.end}")
        self._check_token(seen, turn)
        self.log.append(seen.token)
        self.has_token = True
        self.token_at = self.served_at = self._tools.clock.now
        self.tokens += 1
        self._overdues = 0
        self._forks.on_token(turn.request, self.log, self._max_length, self.reservation)
        self._read_token()
        return self._act(seen, turn)

    def _count_overdue(self, seen: Rerouted | MigrationEnded) -> None:
        self._overdues += isinstance(seen, Rerouted) and seen.cause == "overdue"
        most = self._tools.scenario.max_overdues
        self._expect(self._overdues <= most, f"no route was found by {most} overdue tokens")

    def _check_scores(self, seen: PromptScored) -> None:
        assert self.turn is not None or self._expect(False, f"{seen} while no turn runs")
        assert self.turn is not None
        self._expect(seen.start == self._scored, f"{seen}, but {self._scored} is the next one")
        self._scored += len(seen.entries)
        self._record_progress()
        tokens = self.turn.request.tokens
        self._expect(self._scored <= len(tokens), f"{seen} beyond the prompt")
        expected = self._reference.scores(tokens[: self._scored], seen.start)
        self._expect(seen.entries == expected, f"{seen}, but the reference says {expected}")

    def _on_rows(self, seen: RowsReturned) -> None:
        """Check returned rows: each comes once, in order, within the credit, as an undisturbed run computes it."""
        assert self.turn is not None or self._expect(False, f"{seen} while no turn runs")
        assert self.turn is not None
        request, rows = self.turn.request, self.rows
        end = seen.start + len(seen.payload) // ROW_BYTES
        self._expect(request.sampling.returned is not None, f"{seen}, but no rows were asked for")
        self._expect(seen.start == rows.next, f"{seen}, but {rows.next} is the next one")
        self._expect(end <= len(self.log), f"{seen}, but the log has {len(self.log)} entries")
        expected = self._reference.rows(self.log, seen.start, end)
        self._expect(seen.payload == expected, f"{seen}, but the reference says {expected!r}")
        limit = self._read + request.credit_ahead
        self._expect(end <= limit, f"{seen} is beyond the credit {limit}")
        rows.next = end
        self.returned += end - seen.start
        self._record_progress()
        self.served_at = self._tools.clock.now
        self._read_token()

    def _check_token(self, seen: Emitted, turn: Progress) -> None:
        request = turn.request
        expected = self._reference.next_token(self.log, request.sampling, turn_begin(request))
        self._expect(seen.token == expected.token, f"{seen}, but the reference says {expected}")
        self._expect(seen.logprob == expected.logprob, f"{seen}, but the reference says {expected}")
        self._expect(seen.top == expected.top, f"{seen}, but the reference says {expected}")
        last = seen.position == turn.end - 1
        finish = Finish.LENGTH if last else Finish.NONE
        if seen.token in request.sampling.eos:
            finish = Finish.STOP
        self._expect(seen.finish is finish, f"{seen} should finish with {finish}")
        credit = (
            self._read + request.credit_ahead + self._reroutes
        )  # each StartEpoch samples one (R7, credit)
        if request.sampling.grammar is not None:  # and with each token the forced ones after it
            credit += (1 + self._reroutes) * request.sampling.grammar.max_forced
        self._expect(seen.position <= credit, f"{seen} is beyond the credit {credit}")

    def _read_token(self) -> None:
        if not self._slow:
            self._read = self._received
            self.gateway.core.on_read(self.name, self._read, self._tools.clock.now)
        elif not self._reading:
            self._schedule_read()

    @property
    def _received(self) -> int:
        """The end of the entries that the client may have read: with returned rows, those whose row it has."""
        assert self.turn is not None
        has_rows = self.turn.request.sampling.returned is not None and not self.has_token
        return self.rows.next if has_rows else len(self.log)

    def _act(self, seen: Emitted, turn: Progress) -> bool:
        """Close, end the turn or stop it if this token says so. False if the rest of the turn is ignored."""
        if turn.close_at == len(self.log):
            self.close()
            return False
        if seen.finish is not Finish.NONE:
            self._end_turn()
            return True
        if turn.stop_at == len(self.log):
            self._note("stops", f"at {len(self.log)}")
            self.gateway.core.truncate_turn(self.name, len(self.log), self._tools.clock.now)
            self._end_turn()
            return False
        if self._load.resumes_turns and self._away_rng.random() < AWAY_CHANCE:
            self._break_stream()
        return True

    def _end_turn(self) -> None:
        self._note("turn ends", f"{len(self.log)} entries")
        self.turn, self.served_at = None, self._tools.clock.now
        self._serial += 1
        self._reading = False
        think = self._load.think_seconds
        pause = self._rng.expovariate(1 / think) if think else 0.0
        self.gateway.later(pause, self._next, self._serial)

    def _on_refusal(self, effect: Refused) -> None:
        """Retry the turn later, as after a 429, or close the session."""
        self._expect(self.turn is not None, f"{effect} while no turn runs")
        assert self.turn is not None
        request, turn = self.turn.request, self.turn
        self._expect(len(self.log) == len(request.tokens), f"{effect} after a token")
        self.turn, self._is_pending = None, True
        self._record_progress()
        if self._rng.random() < self._load.quit_chance:
            self.close()
            return
        self.gateway.later(
            effect.retry_after * self._rng.uniform(0.1, 1.0), self._retry, turn, self._serial
        )

    def _on_session_lost(self, effect: SessionLost) -> None:
        """Check that the session may end: after repeated model failures or the hold limit (I8, honest end)."""
        scenario = self._tools.scenario
        expected = scenario.conditions.failed_step_chance > 0 or scenario.hold_limit_seconds < NEVER
        expected |= scenario.load.is_poisoned(self.name)
        self._expect(expected, f"the session was lost: {effect.detail}")
        self.abandon()

    def _retry(self, turn: Progress, serial: int) -> None:
        if serial == self._serial and not self.done:
            self._begin(turn.request)

    # -- oracles ---------------------------------------------------------------------------

    def _record_progress(self) -> None:
        self.progress_at = self._tools.clock.now

    def _expect(self, holds: bool, text: str) -> bool:
        if not holds:
            raise Violation(f"{self.name}: {text}", self.name)
        return True

    def _note(self, what: str, text: str = "") -> None:
        self._tools.trace.note(self._tools.clock.now, self.name, what, f"{text}")
