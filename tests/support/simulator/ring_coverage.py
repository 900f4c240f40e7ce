"""Tells whether every gateway keeps a ring of connected servers over all blocks, without which no protocol can work.

Asked before each lasting fault. Knows names, spans and parted pairs, nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

Span = tuple[int, int]


class Coverage:
    """The spans and parted pairs that will last. A change that would leave a gateway without a ring is refused."""

    def __init__(
        self, spans: Mapping[str, Span], n_blocks: int, gateways: Callable[[], Iterable[str]]
    ) -> None:
        self.spans = dict(spans)  # of the servers that will run in the end
        self._n_blocks = n_blocks
        self._gateways = gateways
        self._parted: set[frozenset[str]] = set()

    def remove_server(self, name: str) -> bool:
        """Remove a server for good. False if it is needed."""
        rest = {each: span for each, span in self.spans.items() if each != name}
        return self._accept(rest, self._parted)

    def part(self, pair: frozenset[str]) -> bool:
        """Part two processes for good. False if no ring would remain."""
        return self._accept(self.spans, self._parted | {pair})

    def change_span(self, name: str, span: Span) -> bool:
        """Give a server another span. False if no ring would remain."""
        return self._accept({**self.spans, name: span}, self._parted)

    def suffices_without(self, names: Iterable[str]) -> bool:
        """True if the other servers have a ring for the time being. Changes nothing."""
        gone = set(names)
        return self._suffices({s: x for s, x in self.spans.items() if s not in gone}, self._parted)

    def _accept(self, spans: dict[str, Span], parted: set[frozenset[str]]) -> bool:
        if not self._suffices(spans, parted):
            return False
        self.spans, self._parted = spans, parted
        return True

    def _suffices(self, spans: Mapping[str, Span], parted: set[frozenset[str]]) -> bool:
        for gateway in self._gateways():
            reachable = {
                server: span
                for server, span in spans.items()
                if frozenset((server, gateway)) not in parted
            }
            if not has_ring(reachable, self._n_blocks, parted):
                return False
        return True


def has_ring(servers: Mapping[str, Span], n_blocks: int, parted: set[frozenset[str]]) -> bool:
    """True if a chain covers all blocks and its tail reaches its head, without a parted pair."""
    return any(_closes(head, servers, n_blocks, parted) for head in servers)


def _closes(
    head: str, servers: Mapping[str, Span], n_blocks: int, parted: set[frozenset[str]]
) -> bool:
    first, last = servers[head]
    front = [(last, head)] if first == 0 else []
    reached = set(front)
    while front:
        edge, before = front.pop()
        if edge == n_blocks and frozenset((before, head)) not in parted:
            return True
        for name, (first, last) in servers.items():
            step = (last, name)
            if not first <= edge < last or frozenset((before, name)) in parted:
                continue
            if step not in reached:
                reached.add(step)
                front.append(step)
    return False
