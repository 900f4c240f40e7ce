"""The answers of a batch: one line for each request, in the order in which they were completed.

A line is written by one call once its request is over. A killed run therefore leaves whole lines, and perhaps a torn
one at the end. The next run cuts that off, and goes on with the requests that have no line.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self

from modelswarm.cli.batch.input_file import digest
from modelswarm.errors import ModelSwarmError, UserError

OK = 200
_ID = "batch_req_"
_BEGINNING = f'{{"id": "{_ID}'.encode()  # of every line


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The end of one request: an HTTP answer, or the reason why there is none."""

    status: int | None = None  # HTTP; None: no answer
    request_id: str = ""
    body: Any = None
    error: dict[str, str] | None = None  # `code` and `message`, if there is no answer

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    def to_line(self, custom_id: str) -> bytes:
        """Return the output line for a request."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        facts = {
            "id": f"{_ID}{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": response if self.status is not None else None,
            "error": self.error,
        }
        return json.dumps(facts).encode() + b"\n"


@dataclass(slots=True)
class OutputFile:
    """An output that only this process writes, and the requests that have a line in it."""

    path: Path
    file: BinaryIO
    finished: set[bytes] = field(default_factory=set)  # digests of custom_ids
    n_failed: int = 0  # lines with another status than 200

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def append_answer(self, custom_id: str, answer: BatchAnswer) -> None:
        """Write the line of a request, which must have none."""
        line, size = answer.to_line(custom_id), os.fstat(self.file.fileno()).st_size
        try:
            while line:  # a full disk takes a part, and refuses the rest with its reason
                line = line[self.file.write(line) :]
        except OSError:
            self.file.truncate(size)
            raise
        self._count(custom_id, answer.is_ok)

    def read_lines(self, known: Collection[bytes]) -> None:
        """Read the lines of an earlier run. `known`: digests of the custom_ids of the input.

        A torn last line is cut off. UserError if the file is not an output of this input.
        """
        whole = 0
        for number, line in self._numbered_lines():
            if not line.endswith(b"\n"):
                self._cut_torn_line(number, line, whole)
                return
            custom_id, is_ok = self._parse_line(number, line)
            key = digest(custom_id)
            if key not in known:
                self._refuse(number, f"answers {custom_id!r}, which the input does not have")
            if key in self.finished:
                self._refuse(number, f"answers {custom_id!r}, as an earlier line does")
            self._count(custom_id, is_ok)
            whole += len(line)

    def drop_failed(self) -> None:
        """Remove the lines with another status than 200, so that their requests are run again."""
        if not self.n_failed:
            return
        real = self.path.resolve()  # a link must not become a file beside the old one
        copy = real.with_name(f"{real.name}.{os.getpid()}.tmp")
        kept = set()
        try:
            with copy.open("wb") as target:
                for number, line in self._numbered_lines():
                    custom_id, is_ok = self._parse_line(number, line)
                    if is_ok:
                        target.write(line)
                        kept.add(digest(custom_id))
                os.fsync(target.fileno())
            shutil.copymode(real, copy)
            # The new file is locked before it gets the name, so that no other process can take it between.
            replacement = _open_locked(copy)
            copy.replace(real)
        except BaseException:  # a full disk, or Ctrl-C
            copy.unlink(missing_ok=True)
            raise
        self.file.close()
        self.file, self.finished, self.n_failed = replacement, kept, 0

    def _numbered_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines by a buffered reader of its own: `file` has no buffer, and would read byte by byte."""
        with self.path.open("rb") as reader:
            yield from enumerate(reader, start=1)

    def _count(self, custom_id: str, is_ok: bool) -> None:
        self.finished.add(digest(custom_id))
        self.n_failed += not is_ok

    def _cut_torn_line(self, number: int, line: bytes, whole: int) -> None:
        """Truncate the file after its last whole line, at byte `whole`. Refuse a torn line that is not of a batch."""
        if not line.startswith(_BEGINNING[: len(line)]):
            self._refuse(number, "is not an answer of a batch")
        self.file.truncate(whole)

    def _parse_line(self, number: int, line: bytes) -> tuple[str, bool]:
        """Return the custom_id, and whether the status is 200."""
        try:
            facts = json.loads(line)
            custom_id, response = facts["custom_id"], facts["response"]
            return str(custom_id), response is not None and response["status_code"] == OK
        except (ValueError, KeyError, TypeError, RecursionError):
            self._refuse(number, "is not an answer of a batch")

    def _refuse(self, number: int, sentence: str) -> NoReturn:
        allowed = "allowed: a new file, or the output of an earlier run of this input"
        raise UserError(f"{self.path}, line {number}", f"{sentence}; {allowed}")


def check_output(path: Path, source: Path) -> None:
    """Raise UserError for a path that cannot be the output of the input `source`. Makes no file."""
    if path.exists() and not path.is_file():
        raise UserError("--output", f"{path} is not a regular file; allowed: a file")
    if path.exists() and path.samefile(source):
        raise UserError("--output", f"{path} is the input; allowed: another file")
    if not path.absolute().parent.is_dir():
        raise UserError(
            "--output", f"{path}: no such folder; allowed: a file in a folder that exists"
        )


def open_output(path: Path, known: Collection[bytes]) -> OutputFile:
    """Open an output whose path is checked, made if needed; `known` as in `OutputFile.read_lines`."""
    output = OutputFile(path, _open_locked(path))
    try:
        output.read_lines(known)
    except BaseException:
        output.file.close()
        raise
    return output


def _open_locked(path: Path) -> BinaryIO:
    """Open the file for reading and appending. ModelSwarmError if another process has it open so."""
    file = path.open("a+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ModelSwarmError(f"{path}: another process writes it; wait for its end") from None
    return file
