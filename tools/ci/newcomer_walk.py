"""Walk through the README as a newcomer: a bare Debian, a fresh clone, and every command in its order.

    nice -n 10 .venv/bin/python -m tools.ci.newcomer_walk [--skip COMMAND] [--folder DIR] [--keep] [--reuse]

Needs Linux, root, debootstrap and package mirrors; takes about 15 minutes and 15 GB of disk. The clone has the
committed tree only. First wrong prerequisites are tried, each of which must give the sentence that helps. Then the
commands of the README run as an ordinary user. Commands of a cluster run on the host, in other tests; the report
names them. Exit code 1: the walk found a fault. Run by `make soak`.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tools.ci.newcomer import container as containers
from tools.ci.newcomer.checks import Check, counts, has, refuses
from tools.ci.newcomer.container import Container, environment_inside
from tools.ci.newcomer.readme import Command, commands, documents
from tools.ci.newcomer.report import Report, Row
from tools.ci.newcomer.steps import STEPS, Step, Way, plan_walk
from tools.recording.pseudo_terminal import CTRL_C, CTRL_D, PseudoTerminal, TerminalError

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "build" / "newcomer" / "walk.log"
SUITE, OLD_SUITE = "bookworm", "bullseye"  # Debian 12 has Python 3.11, Debian 11 has 3.9
TRIAL_SECONDS = 600.0
END_SECONDS = 60.0
PROMPT = r"^> $"
QUESTION, FIRST, LAST = "Count from 57 to 70.", 57, 70


class WalkError(RuntimeError):
    """A command without which the rest of the walk says nothing has failed."""


class Walker:
    """Runs commands in a container as a person with two terminals does."""

    def __init__(self, container: Container, report: Report) -> None:
        self._container, self._report = container, report
        self._swarm = ExitStack()
        self._terminal: PseudoTerminal | None = None

    def open(self, command: str, as_root: bool = False) -> PseudoTerminal:
        words = self._container.words(command, as_root)
        return PseudoTerminal(words, environment_inside(as_root))

    def run(
        self, command: str, check: Check, seconds: float, code: int = 0, as_root: bool = False
    ) -> bool:
        """Run a command to its end; it must exit with `code`, and its output must pass the check."""
        began = time.monotonic()
        found: int | None = None
        with self.open(command, as_root) as terminal:
            try:
                found = terminal.wait_end(seconds)
                fault = "" if found == code else f"exit code {found} instead of {code}"
                fault = fault or check(terminal.text)
            except TerminalError as error:
                fault = str(error)
            output = terminal.text
        self._add(command, began, found, fault, output)
        return not fault

    def take(self, command: str, step: Step) -> bool:
        """Take a step of the README; return whether its output was right."""
        if step.ends_swarm:
            self.end_swarm()
        if step.way is Way.START:
            return self._start(command, step)
        if step.way is Way.TALK:
            return self._talk(command, step)
        return self.run(command, step.check, step.seconds, as_root=step.way is Way.RUN_AS_ROOT)

    def _start(self, command: str, step: Step) -> bool:
        """Start the swarm in a terminal of its own, where it stays."""
        began, fault = time.monotonic(), ""
        self._terminal = self._swarm.enter_context(self.open(command))
        try:
            self._terminal.wait_for("ready: counting at", step.seconds)
            self._terminal.wait_for("in another terminal", END_SECONDS)
            fault = step.check(self._terminal.text)
        except TerminalError as error:
            fault = str(error)
        self._add(command, began, None, fault, self._terminal.text)
        return not fault

    def _talk(self, command: str, step: Step) -> bool:
        """Ask a question in a second terminal, and leave by Ctrl-D."""
        began, fault = time.monotonic(), ""
        code: int | None = None
        with self.open(command) as terminal:
            try:
                start = terminal.wait_for(PROMPT, step.seconds).end()
                terminal.type(f"{QUESTION}\r")
                asked = terminal.wait_for(r"Count.*$", step.seconds, start).end()
                end = terminal.wait_for(PROMPT, step.seconds, asked).start()
                fault = counts(FIRST, LAST)(terminal.text[asked:end])
                terminal.type(CTRL_D)
                code = terminal.wait_end(END_SECONDS)
                fault = fault or ("" if code == 0 else f"exit code {code} instead of 0")
            except TerminalError as error:
                fault = str(error)
            output = terminal.text
        self._add(command, began, code, fault, output)
        return not fault

    def end_swarm(self) -> None:
        """Press Ctrl-C in the terminal of `up`, if it runs; no process may be left."""
        if self._terminal is None:
            return
        terminal, self._terminal = self._terminal, None
        began, fault = time.monotonic(), ""
        code: int | None = None
        terminal.type(CTRL_C)
        try:
            code = terminal.wait_end(END_SECONDS)
            fault = "" if code in (0, 130) else f"exit code {code}"
            fault = fault or has("stopped")(terminal.text)
        except TerminalError as error:
            fault = str(error)
        self._swarm.close()
        if left := self._container.processes():
            fault = fault or f"{len(left)} processes are left: {'; '.join(left)}"
        self._add("(Ctrl-C in the terminal of `up`)", began, code, fault, terminal.text)

    def close(self) -> None:
        self._swarm.close()

    def _add(self, command: str, began: float, code: int | None, fault: str, output: str) -> None:
        self._report.add(Row(command, time.monotonic() - began, code, fault), output)


def main(words: Sequence[str]) -> int:
    chosen = parse_arguments(words)
    if found := containers.obstacles():
        raise SystemExit("\n".join(["the newcomer's walk can't run here:", *found]))
    page = containers.read_committed(ROOT, "README.md")
    planned = plan_walk(commands(page))
    report = Report(LOG)
    with folder_for(chosen.folder, chosen.keep) as folder:
        try:
            root = folder / SUITE
            if chosen.reuse:
                report.tell(f"a new clone of {containers.copy_clone(ROOT, root)} in {root}")
            else:
                try_old_python(folder / OLD_SUITE, report)
                make_container(root, SUITE, ("ca-certificates",), report)
                try_missing_programs(root, report)
            walk(root, planned, documents(page), chosen, report)
        except (WalkError, RuntimeError) as error:
            report.add(Row("(the walk ended early)", 0.0, None, str(error)))
    print(report.summary())
    return 0 if report.is_good else 1


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="newcomer_walk", description=__doc__)
    parser.add_argument("--folder", type=Path, help="of the root file systems; default: a new one")
    parser.add_argument("--skip", action="append", default=[], help="a command; may be repeated")
    parser.add_argument("--keep", action="store_true", help="keep the folder, to look around")
    reuse = "walk in the Debian that --keep has left in the folder, without wrong prerequisites"
    parser.add_argument("--reuse", action="store_true", help=reuse)
    return parser.parse_args(words)


@contextmanager
def folder_for(given: Path | None, keep: bool) -> Iterator[Path]:
    """Give the folder of the root file systems, and remove it at the end."""
    folder = given or Path(tempfile.mkdtemp(prefix="modelswarm-newcomer-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder)


def make_container(root: Path, suite: str, packages: Sequence[str], report: Report) -> None:
    began = time.monotonic()
    shutil.rmtree(root, ignore_errors=True)
    containers.make_root(root, suite, packages)
    clone = containers.copy_clone(ROOT, root)
    report.tell(
        f"a bare Debian ({suite}) with a clone of {clone}: {time.monotonic() - began:.0f} s"
    )


def try_old_python(root: Path, report: Report) -> None:
    make_container(root, OLD_SUITE, ("make", "python3-minimal"), report)
    with Container(root, network=False) as container:
        sentence = "ModelSwarm needs Python 3.11 or newer, and python3 is 3.9"
        Walker(container, report).run("make demo", refuses(sentence), TRIAL_SECONDS, code=2)


def try_missing_programs(root: Path, report: Report) -> None:
    """Try the first command without make, without Python, and without its venv module."""
    no_python = "ModelSwarm needs Python 3.11 or newer, and python3 is not found"
    no_venv = "ModelSwarm needs the venv module of Python 3.11"
    with Container(root) as container:
        walker = Walker(container, report)
        walker.run("make demo", refuses("make: command not found"), TRIAL_SECONDS, code=127)
        walker.run("apt-get update", has(), TRIAL_SECONDS, as_root=True)
        walker.run("apt-get install make", has(), TRIAL_SECONDS, as_root=True)
        walker.run("make demo", refuses(no_python), TRIAL_SECONDS, code=2)
        walker.run("apt-get install python3", has(), TRIAL_SECONDS, as_root=True)
        walker.run("make demo", refuses(no_venv), TRIAL_SECONDS, code=2)


def walk(
    root: Path,
    planned: Sequence[tuple[Command, Step]],
    shown: Sequence[str],
    chosen: argparse.Namespace,
    report: Report,
) -> None:
    """Run all commands of the README. Neighbours with the same need of a network share a container."""
    report.tell("README.md, top to bottom:")
    for has_network, group in itertools.groupby(planned, lambda each: each[1].has_network):
        with Container(root, has_network) as container:
            walker = Walker(container, report)
            try:
                if not has_network:
                    try_alone(walker)
                for command, step in group:
                    take_step(walker, command, step, chosen.skip, report)
                    if step.way is Way.RUN_AS_ROOT and not chosen.reuse:
                        try_without_network(root, report)
                walker.end_swarm()
                if not has_network:
                    try_documents(walker, root, shown)
            finally:
                walker.close()


def take_step(
    walker: Walker, command: Command, step: Step, skipped: Sequence[str], report: Report
) -> None:
    reason = step.reason if step.way is Way.ELSEWHERE else ""
    if step.beginning.strip() in skipped:
        reason = "skipped, as the command line says"
    if reason:
        report.add(Row(command.text, 0.0, None, note=reason))
    elif not walker.take(command.text, step) and step.is_needed:
        raise WalkError(f"without {command.text!r} the rest cannot be tried")


def try_without_network(root: Path, report: Report) -> None:
    """Try the first command where no package index can be reached; pip's own lines come before the sentence."""
    sentence = "ModelSwarm's packages could not be installed: pip ended with code 1"
    with Container(root, network=False) as container:
        walker = Walker(container, report)
        walker.run("make demo", refuses(sentence, lines=None), TRIAL_SECONDS, code=2)


def try_alone(walker: Walker) -> None:
    """Try commands that come too early or need another machine: each must say so."""
    no_swarm = refuses("no swarm runs on this machine: start one with `modelswarm up FILE`")
    walker.run(".venv/bin/modelswarm chat", no_swarm, TRIAL_SECONDS, code=1)
    no_cluster = refuses("make cluster can't run here: not root", lines=6)
    walker.run("make cluster", no_cluster, TRIAL_SECONDS, code=2)


def try_documents(walker: Walker, root: Path, shown: Sequence[str]) -> None:
    """Give the documents that the README shows to `plan`."""
    for number, text in enumerate(shown, 1):
        name = f"readme-{number}.yaml"
        (containers.inside(root, containers.CLONE) / name).write_text(text, encoding="utf-8")
        plan = next(step for step in STEPS if " plan " in step.beginning)
        walker.run(f".venv/bin/modelswarm plan {name}", plan.check, plan.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
