"""The coverage of a model, as the gateway's metrics report it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelswarm_gateway.core.interface.views import ServerView
from modelswarm_gateway.metrics.collectors import lowest_coverage

HEAD = ServerView("s0/1/a", "", "m", "old", 0, 2, 4, 0, "", None)
TAIL = replace(HEAD, first=2, last=4)


@pytest.mark.parametrize(
    ("servers", "coverage"),
    [
        ([], 0),
        ([HEAD], 0),
        ([HEAD, TAIL], 1),
        ([HEAD, HEAD, TAIL], 1),
        ([HEAD, HEAD, TAIL, TAIL], 2),
    ],
)
def test_coverage_is_that_of_the_weakest_block(servers: list[ServerView], coverage: int) -> None:
    assert lowest_coverage(4, servers) == coverage


@pytest.mark.parametrize("change", [{"revision": "new"}, {"dtype": "bfloat16"}])
def test_variants_of_a_rollout_are_not_added_up(change: dict[str, str]) -> None:
    """No route mixes two variants: a server of each for every block leaves no spare."""
    new = [replace(each, **change) for each in (HEAD, TAIL)]  # type: ignore[arg-type]
    assert lowest_coverage(4, [HEAD, TAIL, *new]) == 1
    assert lowest_coverage(4, [HEAD, new[1]]) == 0
    assert lowest_coverage(4, [HEAD, TAIL, *new, *new]) == 2
