"""One run of a batch: checks both files, sends what has no answer yet, and tells what is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from modelswarm.cli.batch.input_file import (
    BatchRequest,
    InputFacts,
    check_input,
    digest,
    read_requests,
)
from modelswarm.cli.batch.output_file import BatchAnswer, OutputFile, check_output, open_output
from modelswarm.cli.batch.progress import ProgressBar
from modelswarm.cli.batch.sending import BatchSender, RequestTimeouts
from modelswarm.cli.json_output.printing import print_json
from modelswarm.cli.options.model import choose_model
from modelswarm.cli.terminal.names import count_of
from modelswarm.client.api.sync_client import Client
from modelswarm.errors import ModelSwarmError, UserError

Send = Callable[[BatchRequest], Awaitable[BatchAnswer]]


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of the command that concern the requests, not the files."""

    model: str | None  # of lines that name none; None: the gateway's first
    concurrency: int
    timeouts: RequestTimeouts
    as_json: bool


def run_batch(
    base: str, source: Path, target: Path, retry_failed: bool, options: BatchOptions
) -> int:
    """Run what the output `target` lacks of the input `source`. Return the exit code: 1 if a line failed."""
    facts = check_input(source)
    check_output(target, source)
    began = time.monotonic()
    # A new output is made when its gateway has answered: a wrong address or model leaves no empty file.
    model = None if target.exists() else _choose_model(base, source, facts, options.model)
    with open_output(target, facts.ids) as output:
        before = len(output.finished) - (output.n_failed if retry_failed else 0)
        if before < facts.n_lines:
            model = model or _choose_model(base, source, facts, options.model)
            if retry_failed:  # not before it is known that their requests can be run again
                output.drop_failed()
            try:
                asyncio.run(_send_missing(base, model, source, facts, output, options))
            except (KeyboardInterrupt, ModelSwarmError, OSError) as error:
                _report_stop(output, facts, isinstance(error, KeyboardInterrupt))
                raise
        _report_end(output, facts, before, time.monotonic() - began, options.as_json)
        return 1 if output.n_failed else 0


def _choose_model(base: str, source: Path, facts: InputFacts, wanted: str | None) -> str:
    """Return the model of lines that name none. UserError for a line whose model is not served."""
    with Client(base, max_retries=0) as client:
        models = client.models()
    chosen, served = choose_model(models, wanted), {model.name for model in models}
    for name, number in facts.models.items():
        if name not in served:
            known = ", ".join(sorted(served))
            sentence = f"body.model: {name!r} is not served here; known are: {known}"
            raise UserError(f"{source}, line {number}", sentence)
    return chosen.name


async def _send_missing(
    base: str,
    model: str,
    source: Path,
    facts: InputFacts,
    output: OutputFile,
    options: BatchOptions,
) -> None:
    missing = (
        request
        for _, request in read_requests(source)
        if digest(request.custom_id) not in output.finished
    )
    with ProgressBar(facts.n_lines, len(output.finished), output.n_failed) as bar:
        async with BatchSender(base, model, options.concurrency, options.timeouts) as sender:

            def keep(request: BatchRequest, answer: BatchAnswer) -> None:
                output.append_answer(request.custom_id, answer)
                bar.count_line(answer.is_ok)

            await answer_all(missing, sender.fetch_answer, keep, options.concurrency)


async def answer_all(
    requests: Iterator[BatchRequest],
    send: Send,
    keep: Callable[[BatchRequest, BatchAnswer], None],
    concurrency: int,
) -> None:
    """Send the requests, at most `concurrency` at a time, and keep each answer when it comes.

    A request is read only when it can be sent. The first error ends all.
    """

    async def work() -> None:
        for request in requests:
            keep(request, await send(request))

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _report_stop(output: OutputFile, facts: InputFacts, is_interrupted: bool) -> None:
    cause = "interrupted" if is_interrupted else "stopped"
    done = f"{len(output.finished)} of {count_of(facts.n_lines, 'line')} are in {output.path}"
    click.echo(f"{cause}: {done}; the same command goes on from there", err=True)


def _report_end(
    output: OutputFile, facts: InputFacts, before: int, seconds: float, as_json: bool
) -> None:
    done = facts.n_lines - before
    if as_json:
        print_json(
            {
                "output": str(output.path),
                "total": facts.n_lines,
                "ok": facts.n_lines - output.n_failed,
                "failed": output.n_failed,
                "done_before": before,
                "seconds": round(seconds, 3),
            }
        )
        return
    earlier = f", {before} of them by an earlier run" if before else ""
    click.echo(
        f"{count_of(facts.n_lines, 'line')} in {output.path}{earlier}: {facts.n_lines - output.n_failed} answered, "
        f"{output.n_failed} failed; {seconds:.1f} s, {done / max(seconds, 1e-9):.1f} lines/s"
    )
    if output.n_failed:
        click.echo("--retry-failed runs the failed lines again", err=True)
