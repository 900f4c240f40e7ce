"""The search for a ring without unreliable links: exact, and bounded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection

import pytest
from support.simulator.ring_coverage import has_ring

from modelswarm_gateway.core.routing import ring_search
from modelswarm_gateway.core.routing.ring_search import find_ring

Spans = dict[str, tuple[int, int]]


def route(spans: Spans, n_blocks: int, *bad: str) -> list[tuple[str, int, int]] | None:
    found = find_ring(spans, (0, n_blocks), pairs(bad))
    return None if found is None else [(hop.peer, hop.first, hop.last) for hop in found]


def pairs(links: Collection[str]) -> set[frozenset[str]]:
    return {frozenset(link) for link in links}


def test_needed_tail_is_entered_later_behind_another_server() -> None:
    spans = {"a": (0, 2), "b": (2, 4), "t": (4, 6), "m": (3, 5)}
    assert route(spans, 6) == [("a", 0, 2), ("b", 2, 4), ("t", 4, 6)]
    expected = [("a", 0, 2), ("b", 2, 4), ("m", 4, 5), ("t", 5, 6)]
    assert route(spans, 6, "bt") == expected


def test_tail_has_a_link_to_the_head() -> None:
    spans = {"a": (0, 2), "b": (0, 2), "t": (2, 4)}
    assert route(spans, 4, "at") == [("b", 0, 2), ("t", 2, 4)]
    assert route(spans, 4, "at", "bt") is None


def test_preferred_servers_come_first() -> None:
    spans = {"b": (0, 2), "t": (2, 4), "a": (0, 2), "s": (2, 4)}
    assert route(spans, 4) == [("b", 0, 2), ("t", 2, 4)]


def test_ring_is_found_among_thousands_of_servers() -> None:
    """The first servers of neighbouring spans have no usable link, and all others have."""
    spans = {f"s{at}-{n}": (4 * at, 4 * at + 4) for at in range(8) for n in range(500)}
    bad = {frozenset((f"s{at}-0", f"s{at + 1}-0")) for at in range(7)}
    found = find_ring(spans, (0, 32), bad)
    assert found is not None
    peers = [hop.peer for hop in found]
    assert not bad.intersection(map(frozenset, itertools.pairwise(peers)))


def test_search_ends_after_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last head has a usable link to the tails, so the search goes through all the others first."""
    spans = {f"s{n}": (n % 4, n % 4 + 1) for n in range(40)}
    last = [name for name, (first, _) in spans.items() if first == 3]
    *heads, best = [name for name, (first, _) in spans.items() if first == 0]
    bad = {frozenset(p) for p in itertools.product(heads, last)}
    found = find_ring(spans, (0, 4), bad)
    assert found is not None and found[0].peer == best
    monkeypatch.setattr(ring_search, "MAX_STEPS", 10)
    assert find_ring(spans, (0, 4), bad) is None


@pytest.mark.parametrize("seed", range(200))
def test_ring_is_found_if_and_only_if_there_is_one(seed: int) -> None:
    rng = random.Random(seed)
    n_blocks = rng.randint(1, 5)
    spans: Spans = {}
    for name in "abcdef":
        first = rng.randrange(n_blocks)
        spans[name] = (first, rng.randint(first + 1, n_blocks))
    every = list(itertools.combinations(spans, 2))
    bad = {frozenset(pair) for pair in rng.sample(every, rng.randint(0, len(every)))}
    found = find_ring(spans, (0, n_blocks), bad)
    assert (found is not None) == has_ring(spans, n_blocks, bad)
    if found is not None:
        assert [hop.first for hop in found] == [0, *(hop.last for hop in found[:-1])]
        assert found[-1].last == n_blocks
        peers = [hop.peer for hop in found]
        assert not bad.intersection(
            frozenset(link) for link in zip(peers, [*peers[1:], peers[0]], strict=True)
        )
