"""Fields of `POST /v1/sessions`. Data only."""

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
