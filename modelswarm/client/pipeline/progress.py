"""The progress bar of a run: tqdm's, which is imported only if it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from modelswarm.errors import UserError


@contextmanager
def progress_bar(total: int, done: int, use_tqdm: bool) -> Iterator[Callable[[], object]]:
    """Yield a function that counts one more prompt of `total`. UserError if tqdm is wanted and missing."""
    if not use_tqdm:
        yield lambda: None
        return
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError:
        raise UserError(
            "use_tqdm", "tqdm is not installed; pip install tqdm, or leave it out"
        ) from None
    # mininterval 0: a count that comes within tqdm's 0.1 s would not be shown until the next prompt ends.
    with tqdm(total=total, initial=done, unit="prompt", mininterval=0) as bar:
        yield bar.update
