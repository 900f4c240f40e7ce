"""Progress lines: what is being started and how long it took. Used by the parts that start something."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Report = Callable[[str], AbstractContextManager[None]]


@contextmanager
def say(what: str) -> Iterator[None]:
    """`what ... 0.8 s` on stderr, so that stdout is left for what a shell may evaluate."""
    started = time.monotonic()
    try:
        yield
    except BaseException:
        print(
            f"{what}: failed after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True
        )
        raise
    print(f"{what}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
