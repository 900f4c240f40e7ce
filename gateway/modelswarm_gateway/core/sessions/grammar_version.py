"""Version of the library that runs a session's grammar: the one that its tail should have, and changes of it.

Used by the recovery loop and the route planner. Knows neither grammars nor versions: it compares what servers announce.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm_gateway.core.interface.effects import Effect, GrammarVersionChanged
from modelswarm_gateway.core.sessions.session import Hop, Session


def wanted_version(session: Session) -> str:
    """Return the version that should run the session's grammar: its last tail's, else the one that has checked it."""
    grammar = session.turn.sampling.grammar
    if grammar is None:
        return ""
    has_generated = session.length > session.turn.begin
    return (has_generated and session.grammar_version) or grammar.version


def record_version(session: Session, tail: Hop, emit: Callable[[Effect], None]) -> None:
    """Record the version at the tail that starts now, and report that it is another one than before."""
    if session.turn.sampling.grammar is None:
        return
    before, session.grammar_version = session.grammar_version, tail.grammar_version
    if before and before != tail.grammar_version and session.length > session.turn.begin:
        emit(GrammarVersionChanged(session.name, tail.peer, before, tail.grammar_version))
