"""Names and counts as screens show them: the common beginning of names, and plurals.

Used by all tables, and by `drain` to find a server by the short name that a narrow table shows.
"""

from __future__ import annotations

from collections.abc import Collection


def common_beginning(names: Collection[str]) -> str:
    """Return the beginning that all names share, up to and including a hyphen; empty for a single name."""
    if len(set(names)) < 2:
        return ""
    # All others lie between the first and the last one, so they share what these two share.
    first, last = min(names), max(names)
    length = next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    return first[: first.rfind("-", 0, length) + 1]


def find_name(given: str, names: Collection[str]) -> str:
    """Return the only one of `names` that is `given` or ends with a hyphen and `given`; else `given` itself."""
    if given in names:
        return given
    ending = {name for name in names if name.endswith(f"-{given}")}
    return ending.pop() if len(ending) == 1 else given


def count_of(number: int, noun: str) -> str:
    """Return `1 server`, `2 servers`; `noun` is the singular."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
