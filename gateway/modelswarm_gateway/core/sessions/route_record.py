"""The record of a route that ran last: the numerics class of each block, and the version of the grammar library.

Used by the recovery loop and the route planner. New hops should have the same; a change is reported. Knows neither
grammars nor numbers: it compares what servers announce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from modelswarm_gateway.core.interface.effects import (
    Effect,
    GrammarVersionChanged,
    NumericsChanged,
)
from modelswarm_gateway.core.servers.numerics import BlockClass, joined_classes, other_classes
from modelswarm_gateway.core.sessions.session import Hop, Session


def wanted_version(session: Session) -> str:
    """Return the version that should run the session's grammar: its last tail's, else the one that has checked it."""
    grammar = session.turn.sampling.grammar
    if grammar is None:
        return ""
    has_generated = session.length > session.turn.begin
    return (has_generated and session.grammar_version) or grammar.version


def classes_of(route: Iterable[Hop]) -> tuple[BlockClass, ...]:
    """Return the numerics classes of a route."""
    return joined_classes(BlockClass(hop.first, hop.last, hop.numerics) for hop in route)


def record_route(session: Session, emit: Callable[[Effect], None]) -> None:
    """Record what the route that starts now runs on, and report what is another than before."""
    _record_version(session, session.hops[-1], emit)
    for hop in session.hops:
        for before in other_classes(
            session.numerics, BlockClass(hop.first, hop.last, hop.numerics)
        ):
            emit(NumericsChanged(session.name, hop.peer, before, hop.numerics))
    session.numerics = classes_of(session.hops)


def _record_version(session: Session, tail: Hop, emit: Callable[[Effect], None]) -> None:
    if session.turn.sampling.grammar is None:
        return
    before, session.grammar_version = session.grammar_version, tail.grammar_version
    if before and before != tail.grammar_version and session.length > session.turn.begin:
        emit(GrammarVersionChanged(session.name, tail.peer, before, tail.grammar_version))
