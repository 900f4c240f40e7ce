"""States of servers and sessions in words and colours, the same in `up`, `status` and `routes`.

The words are made from the gateway's snapshot; `up` adds those of processes. Draws nothing.
"""

from __future__ import annotations

from modelswarm.cli.terminal.tables import Cell
from modelswarm.protocol.wire import api_pb2

READY = "ready"
DRAINING = "draining"
DRAINED = "drained"
STARTING = "starting"
EXITED = "exited"
NOT_LINKED = "not linked"
NO_GATEWAY = "no gateway"
WAITING_FOR_READER = "waiting for its reader"

# Style of all phases of a start.
STARTING_STYLE = "cyan"

# Health of a server with a link and without a fault, as api.proto names it.
_LINKED = "linked"

_STYLES = {
    READY: "green",
    "running": "green",
    STARTING: STARTING_STYLE,
    "canary": "cyan",
    DRAINING: "yellow",
    DRAINED: "yellow",
    "fencing": "yellow",
    "held": "yellow",
    WAITING_FOR_READER: "yellow",
    NO_GATEWAY: "yellow",
    NOT_LINKED: "red",
    "suspected": "red",
    "ejected": "red",
    "failing": "red",
    EXITED: "bold red",
    "parked": "dim",
}


def state_cell(word: str) -> Cell:
    """Return the cell of a state, in its colour."""
    return Cell(word, style=_STYLES.get(word, ""))


def server_state(server: api_pb2.Server) -> str:
    """Return the word for a server's state in the gateway's view."""
    if server.health == DRAINING:
        return DRAINING if server.sessions or server.own_sessions else DRAINED
    return READY if server.health == _LINKED else server.health


def session_state(session: api_pb2.Session) -> str:
    """Return the word for a session's state."""
    return WAITING_FOR_READER if session.waits_for_reader else session.state
