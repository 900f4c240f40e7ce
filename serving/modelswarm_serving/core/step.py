"""Steps of the engine: plans the tasks of each step and applies their results to the hops.

Used by `server.py`. Between `plan` and `finish` the hops are `in_step`: truncating and freeing them waits. Knows no
threads and no torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from modelswarm.protocol.messages import Turn
from modelswarm.protocol.opaque import block_rows, is_opaque, join_rows
from modelswarm_serving.core.fencing import Fencing
from modelswarm_serving.core.flow import send
from modelswarm_serving.core.hops.hop import Fault, Hop, Phase
from modelswarm_serving.core.kv.transfer import KvTransfers
from modelswarm_serving.core.parts import CoreParts
from modelswarm_serving.core.stall_estimator import StallEstimator
from modelswarm_serving.model.base import (
    BatchItem,
    Result,
    ReturnRequest,
    SampleRequest,
    ScoreRequest,
    Task,
)

MEAN_WEIGHT = 0.1
"""Weight of the newest step in the running mean of step times."""
RECENT_STEPS = 128
"""Steps over which the p99 of heartbeats is computed."""


class Steps:
    def __init__(self, parts: CoreParts, fencing: Fencing, transfers: KvTransfers) -> None:
        self._shape = parts.shape
        self._outbox = parts.outbox
        self._scheduler = parts.scheduler
        self._flow_control = parts.flow_control
        self._replay_log = parts.replay_log
        self._fencing = fencing
        self._transfers = transfers
        self._forks = fencing.forks
        self._running: list[tuple[Hop, BatchItem]] = []
        self._started_at = 0.0
        self._transferred_last = False  # the last step was one of KV transfers and forks
        self.rows = 0
        self.mean_seconds = 0.0
        self.busy_seconds = 0.0  # of steps that ran rows, each with its share of stalls
        self.read_bytes = 0.0  # of weights and KV in those steps, in one block
        windows = parts.shape.windows or (None,)
        self._windows = {each: windows.count(each) / len(windows) for each in windows}
        self._stall_estimator = StallEstimator()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def seconds_running(self, now: float) -> float:
        """Seconds since the running step began; 0 when none runs."""
        return max(0.0, now - self._started_at) if self._task_count else 0.0

    @property
    def _task_count(self) -> int:
        """Tasks of the running step: all of rows, or all of KV."""
        return len(self._running) + self._kv_task_count

    @property
    def _kv_task_count(self) -> int:
        return self._forks.running_count + self._transfers.running_count

    def sample_stalls(self, now: float, slept: float) -> None:
        self._stall_estimator.sample(now, self.seconds_running(now), slept)

    @property
    def p99_seconds(self) -> float:
        recent = sorted(self._recent)
        return recent[math.ceil(0.99 * len(recent)) - 1] if recent else 0.0

    def plan(self, now: float) -> tuple[Task, ...]:
        if self._task_count:
            return ()
        self._started_at = now
        rows = self._scheduler.ready_count > 0
        # Steps of rows and of KV take turns.
        tasks = [] if self._transferred_last and rows else self._plan_kv_tasks(now)
        self._transferred_last = bool(tasks)
        if tasks:
            return tuple(tasks)
        if rows:
            self._running = [
                (hop, self._batch_item(hop, most)) for hop, most in self._scheduler.take_batch()
            ]
        return tuple(work for _, work in self._running)

    def _plan_kv_tasks(self, now: float) -> list[Task]:
        """Plan the copies of forks, whose sessions wait for them, and the reads and writes of transfers."""
        tasks: list[Task] = [*self._forks.plan()]
        if self._transfers.ready_count:
            tasks += self._transfers.plan(now, self._scheduler.has_decoding)
        return tasks

    def _batch_item(self, hop: Hop, max_rows: int) -> BatchItem:
        started = hop.started
        assert started is not None
        first = hop.kv
        end = min(hop.ready_end(), first + max_rows)
        hop.in_step = True
        sample = None
        if hop.is_tail and not hop.only_rows and self._is_at_log_end(hop, end):
            sample = SampleRequest(
                hop.turn.sampling,
                end,
                hop.log,
                hop.turn.begin,
                hop.handle,
                max_forced=self._max_forced(hop.turn, end),
            )
        return BatchItem(
            pages=hop.pages,
            first=first,
            count=end - first,
            blocks=(hop.first, hop.last),
            tokens=_tokens_of(hop, first, end) if hop.is_head and not hop.has_range else None,
            rows=self._input_rows(hop, first, end),
            emit_from=self._first_emitted(hop, first, end),
            sample=sample,
            score=self._score_request(hop, first, end),
            returned=self._return_request(hop, first, end),
            opaque=self._opaque_rows(hop, first, end),
            prompts=self._block_prompts(hop, first, end),
            is_range_end=hop.has_range and (hop.is_head or hop.is_tail),
            adapter="" if hop.turn.adapter is None else hop.turn.adapter.name,
        )

    def _opaque_rows(self, hop: Hop, first: int, end: int) -> dict[int, bytes]:
        """Return the rows in place of the embeddings of log entries [first, end)."""
        if not hop.opaque or not hop.is_head or hop.has_range:
            return {}
        size = self._shape.row_bytes
        return {at: hop.opaque[at][:size] for at in range(first, end) if at in hop.opaque}

    def _block_prompts(self, hop: Hop, first: int, end: int) -> dict[int, bytes]:
        """Return the rows that the blocks of the hop add at positions [first, end)."""
        places = range(first, min(end, hop.turn.prompt_rows))
        if not hop.has_log:
            return {at: hop.opaque[at] for at in places}
        size, blocks = self._shape.row_bytes, (hop.first, hop.last)
        return {at: block_rows(hop.opaque[at], size, *blocks) for at in places}

    def _is_at_log_end(self, hop: Hop, end: int) -> bool:
        """True for a tail whose rows below `end` lead to the entry behind the log."""
        started = hop.started
        return started is not None and started.length <= end == len(hop.log)

    def _input_rows(self, hop: Hop, first: int, end: int) -> bytes | memoryview | None:
        """Return rows [first, end) as a hop gets them from its predecessor; a range's head has them in its log."""
        if not hop.is_head:
            return hop.row_buffer.take(end - first)
        return join_rows(hop.opaque, first, end) if hop.has_range else None

    def _max_forced(self, turn: Turn, position: int) -> int:
        """Return the number of forced tokens that may follow the entry at `position` in its step."""
        grammar = turn.sampling.grammar
        return 0 if grammar is None else max(0, min(grammar.max_forced, turn.end - position - 1))

    def _score_request(self, hop: Hop, first: int, end: int) -> ScoreRequest | None:
        """Request the log probabilities of the prompt's entries that follow rows [first, end)."""
        if not hop.scores_prompt or first + 1 >= hop.turn.begin:
            return None
        targets = hop.log[first + 1 : min(end + 1, hop.turn.begin)]
        return ScoreRequest(targets, hop.turn.sampling.prompt_logprobs) if targets else None

    def _return_request(self, hop: Hop, first: int, end: int) -> ReturnRequest | None:
        """Request what the turn asks for of rows [first, end)."""
        wanted = hop.returned_rows
        if wanted is None or end <= wanted.start or hop.has_range:
            return None
        return ReturnRequest(max(first, wanted.start), wanted.logits, wanted.hidden_states)

    def _first_emitted(self, hop: Hop, first: int, end: int) -> int:
        """Return the first position whose output row is needed. The replay log takes all rows, also those that the
        successor has (R6, replay)."""
        if hop.is_tail:
            wanted = hop.returned_rows if hop.has_range else None
            return end if wanted is None else min(max(first, wanted.start), end)
        assert hop.started is not None
        return first if self._replay_log.is_enabled else min(max(first, hop.started.send_from), end)

    def finish(self, results: Sequence[Result], now: float, worked: float | None = None) -> None:
        if len(results) != self._task_count:
            wrong = Result(error=f"{len(results)} results for {self._task_count} tasks")
            results = [wrong] * self._task_count
        if self._kv_task_count:
            self._stall_estimator.discard_step()
            count = self._forks.running_count
            self._finish_forks(results[:count], now)
            self._finish_transfers(results[count:], now)
        elif self._running:
            running, self._running = self._running, []
            self._record_step(running, now - self._started_at, worked)
            for (hop, work), result in zip(running, results, strict=True):
                self._retire(hop, work, result, now)

    def _record_step(
        self, running: Sequence[tuple[Hop, BatchItem]], took: float, worked: float | None
    ) -> None:
        """Record the time of a step of rows. Steps of KV do not count: they say nothing about speed."""
        self._fencing.steps += 1
        self._recent.append(took)
        positions = sum(self._read_positions(work) for _, work in running)
        self.read_bytes += self._shape.block_bytes + positions * self._shape.kv_bytes
        self.busy_seconds += self._stall_estimator.scaled(took, worked)
        weight = MEAN_WEIGHT if self.mean_seconds else 1.0
        self.mean_seconds += weight * (took - self.mean_seconds)

    def _read_positions(self, work: BatchItem) -> float:
        """Return the positions whose KV the item reads, as a mean over the blocks."""
        end = work.first + work.count
        return sum(
            share * (end if window is None else min(end, window + work.count - 1))
            for window, share in self._windows.items()
        )

    def _finish_forks(self, results: Sequence[Result], now: float) -> None:
        for hop in self._forks.take_results(results):
            hop.in_step = False
            if self._release_hop(hop, now):
                self._forks.settle(hop, now)

    def _finish_transfers(self, results: Sequence[Result], now: float) -> None:
        for hop in self._transfers.finish(results, now):
            hop.in_step = False
            if self._release_hop(hop, now):
                self._transfers.schedule_writes(hop)

    def fail(self, error: str, now: float, *, is_full: bool = False) -> None:
        """The step raised, perhaps because of one session: each session runs once more, alone (I7, isolation).

        `is_full`: the device had too little memory. One that is alone already then runs half of its rows.
        """
        is_alone = len(self._running) == 1
        can_halve = is_full and is_alone and self._running[0][1].count > 1
        # the gateway starts a failed transfer again
        if self._kv_task_count or not self._running or (is_alone and not can_halve):
            self.finish([Result(error=error)] * self._task_count, now)
            return
        running, self._running = self._running, []
        self._stall_estimator.scaled(now - self._started_at)
        self._fencing.steps += 1
        for hop, work in running:
            if hop.phase is Phase.RUNNING and not hop.is_freed:
                hop.in_step, hop.alone_rows = False, work.count // (2 if is_alone else 1)
                if work.rows is not None and not hop.is_head:
                    hop.row_buffer.put_back(work.rows)
                self.schedule_ready(hop, now)
            else:
                self._retire(hop, work, Result(error=error), now)

    def _retire(self, hop: Hop, work: BatchItem, result: Result, now: float) -> None:
        hop.in_step, hop.alone_rows = False, 0
        hop.last_used = now
        wrong = self._result_fault(work, result)
        if wrong is None and not hop.is_freed:
            # Also after the end of the epoch: the rows are right, and a pending Fence truncates them if need be.
            hop.kv = work.first + work.count
            hop.drop_used_rows()
            self.rows += work.count
            if result.rows is not None and not hop.is_tail:
                self._replay_log.append(hop.handle, work.emit_from, result.rows)
        if hop.phase is Phase.RUNNING and not hop.is_freed:
            if wrong is None:
                self._send_outputs(hop, work, result)
                self._transfers.schedule_reads(hop)
                self.schedule_ready(hop, now)
            else:
                self.stop_hop(hop, "", Fault(result.fault, wrong))
        self._release_hop(hop, now)

    def _release_hop(self, hop: Hop, now: float) -> bool:
        """The step no longer holds the hop: apply what waited for that. Returns False if the hop was freed."""
        if hop.is_freed:
            self._fencing.admission.release_hop(hop)
        elif hop.pending_fence is not None:
            self._fencing.apply_pending_fence(hop, now)
        return not hop.is_freed

    def _result_fault(self, work: BatchItem, result: Result) -> str | None:
        if result.error is not None:
            return result.error
        wanted = (work.first + work.count - work.emit_from) * self._shape.row_bytes
        if wanted != (0 if result.rows is None else len(result.rows)):
            return "the model returned a wrong number of rows"
        if work.sample is not None and result.sampled is None:
            return "the model sampled no token"
        if (
            work.sample is not None
            and result.sampled is not None
            and len(result.sampled.forced) > work.sample.max_forced
        ):
            return "the model forced too many tokens"
        if len(result.scores) != (0 if work.score is None else len(work.score.targets)):
            return "the model scored a wrong number of tokens"
        asked, end = work.returned, work.first + work.count
        returned = 0 if asked is None else (end - asked.first) * asked.row_bytes(self._shape)
        if len(result.returned) != returned:
            return "the model returned a wrong number of logits or hidden states"
        return None

    def _send_outputs(self, hop: Hop, work: BatchItem, result: Result) -> None:
        started = hop.started
        assert started is not None
        first = max(work.emit_from, started.send_from)  # the successor has the earlier rows
        if started.successor is not None and result.rows and first < work.first + work.count:
            rows = result.rows
            if first > work.emit_from:
                rows = memoryview(rows)[(first - work.emit_from) * self._shape.row_bytes :]
            send.send_rows(self._outbox, hop, first, rows, self._shape.row_bytes)
        if result.scores:
            send.send_prompt_logprobs(self._outbox, hop, work.first + 1, result.scores)
        if work.returned is not None:
            row_bytes = work.returned.row_bytes(self._shape)
            send.return_rows(self._outbox, hop, work.returned.first, result.returned, row_bytes)
        if hop.is_tail and hop.has_range and result.rows:  # behind the last block of the range
            row_bytes = self._shape.row_bytes
            send.return_rows(self._outbox, hop, work.emit_from, result.rows, row_bytes)
        if work.sample is not None and result.sampled is not None:
            send.send_token(self._outbox, hop, result.sampled)
        if not hop.is_head:
            self._flow_control.grant_window(hop)

    def schedule_ready(self, hop: Hop, now: float) -> None:
        """Queue the hop if it can run rows now; called after every change that its rows may have waited for."""
        if hop.phase is not Phase.RUNNING or hop.in_step:
            return
        if hop.is_standby:
            self._transfers.schedule_writes(hop)
            return
        if hop.is_tail:
            send.send_log_read(self._outbox, hop)
        self._scheduler.update_decoding(hop, self._shape.n_blocks)
        if hop.ready_end() > hop.kv:
            self._scheduler.enqueue(hop, now)

    def stop_hop(self, hop: Hop, peer: str, fault: Fault) -> None:
        """Stop the hop for this epoch and report the fault. Only a Fence starts it again, StartEpoch does not."""
        if hop.phase is not Phase.STOPPED:
            hop.phase = Phase.STOPPED
            self._scheduler.remove_hop(hop)
            self._flow_control.remove_hop(hop)
            self._outbox.report_fault(hop, peer, fault)


def _tokens_of(hop: Hop, first: int, end: int) -> list[int]:
    """Return log entries [first, end); opaque ones are 0."""
    entries = hop.log[first:end]
    return [0 if is_opaque(entry) else entry for entry in entries] if hop.opaque else entries
