"""Fields of `POST /v1/sessions` and `POST /v1/sessions/{id}/fork`. Data only."""

from __future__ import annotations

from modelswarm_gateway.api.fields.states import OBEYED, FieldTable

SESSIONS = FieldTable(
    "POST /v1/sessions",
    {
        "ModelSwarm": {
            "model": OBEYED,
            "session_id": OBEYED,
            "max_length": OBEYED,
            "ttl": OBEYED,
        }
    },
)

FORKS = FieldTable(
    "POST /v1/sessions/{id}/fork",
    {"ModelSwarm": {"session_id": OBEYED, "position": OBEYED}},
)
