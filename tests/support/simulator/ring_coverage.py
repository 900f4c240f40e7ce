"""What no protocol can do without: every gateway keeps a ring of living servers over all blocks that can talk.

Asked before each lasting fault; knows names, spans and parted pairs, nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

Span = tuple[int, int]


class Coverage:
    def __init__(
        self, spans: Mapping[str, Span], n_blocks: int, gateways: Callable[[], Iterable[str]]
    ) -> None:
        self.spans = dict(spans)  # of the servers that will be alive in the end
        self._n_blocks = n_blocks
        self._gateways = gateways
        self._parted: set[frozenset[str]] = set()

    def lose(self, name: str) -> bool:
        """May this server be gone for good? Then it is."""
        rest = {each: span for each, span in self.spans.items() if each != name}
        return self._accept(rest, self._parted)

    def part(self, pair: frozenset[str]) -> bool:
        """May these two never talk again? Then they never do."""
        return self._accept(self.spans, self._parted | {pair})

    def reshape(self, name: str, span: Span) -> bool:
        """May this server hold these blocks from now on? Then it does."""
        return self._accept({**self.spans, name: span}, self._parted)

    def without(self, names: Iterable[str]) -> bool:
        """Could the others do it all for a while?"""
        gone = set(names)
        return self._suffice({s: x for s, x in self.spans.items() if s not in gone}, self._parted)

    def _accept(self, spans: dict[str, Span], parted: set[frozenset[str]]) -> bool:
        if not self._suffice(spans, parted):
            return False
        self.spans, self._parted = spans, parted
        return True

    def _suffice(self, spans: Mapping[str, Span], parted: set[frozenset[str]]) -> bool:
        for gateway in self._gateways():
            heard = {s: span for s, span in spans.items() if frozenset((s, gateway)) not in parted}
            if not routable(heard, self._n_blocks, parted):
                return False
        return True


def routable(servers: Mapping[str, Span], n_blocks: int, parted: set[frozenset[str]]) -> bool:
    """Is there a ring over all blocks (a chain whose tail reaches its head) without a parted pair?"""
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
