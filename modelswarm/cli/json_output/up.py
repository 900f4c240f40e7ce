"""The events of `up --json`, one line each: notes, states and progress of processes, ready, stopping, stopped."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from modelswarm.cli.json_output.printing import print_json
from modelswarm.cli.json_output.start import progress_fields
from modelswarm.cli.terminal.signals import run_until_signal
from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document, unused_fields
from modelswarm.local.start_watch import StartView, StartWatch
from modelswarm.local.supervisor import JobChange
from modelswarm.local.swarm import LocalSwarm
from modelswarm.process.start_progress import StartProgress
from modelswarm.resources.spec import ModelSwarm

CHECK_SECONDS = 0.5


def run_up_json(document: ModelSwarm, memory: str | None, settings: LocalSettings) -> None:
    """Run the swarm of a document until a signal, and print each event."""
    plan = plan_document(document, memory, settings.device)
    for field in unused_fields(document):
        print_event("note", message=f"{field} is not used on one machine")
    for warning in plan.warnings:
        print_event("note", message=warning)
    swarm = LocalSwarm(plan, settings, print_change)
    with run_until_signal(swarm.stop, lambda: print_event("stopping")):
        with StartWatch(swarm, ProgressEvents()):
            info = swarm.start()
        print_event("ready", logs=str(swarm.logs), **asdict(info))
        _watch(swarm)
    print_event("stopped")


def _watch(swarm: LocalSwarm) -> None:
    """Raise the supervisor's error if that fails."""
    while True:
        swarm.raise_if_failed()
        time.sleep(CHECK_SECONDS)


class ProgressEvents:
    """Prints the progress of each starting process whenever it differs from the last."""

    def __init__(self) -> None:
        self._last: dict[str, StartProgress] = {}

    def __call__(self, view: StartView) -> None:
        now = view.progress()
        for name, progress in now.items():
            if self._last.get(name) != progress:
                print_progress(name, progress)
        self._last = now


def print_progress(process: str, progress: StartProgress) -> None:
    """Print how far the start of a process is; numbers that are not known are None."""
    print_event("progress", process=process, **progress_fields(progress))


def print_change(change: JobChange) -> None:
    """Print the new state of a process."""
    job = change.job
    print_event(
        "process",
        process=job.name,
        state=job.state.value,
        incarnation=job.incarnation,
        pid=job.pid or None,
        restart_in=job.restart_in,
        exit_reason=job.exit_reason or None,
        log=list(change.log_tail),
    )


def print_event(event: str, **fields: Any) -> None:
    print_json({"event": event, "time": time.time(), **fields})
