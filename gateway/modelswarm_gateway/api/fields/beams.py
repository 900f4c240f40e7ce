"""Reads the fields of a beam search, with vLLM's and transformers' names, and refuses what cannot stand beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.errors import invalid_field

BEAM_FIELDS = ("num_beams", "use_beam_search", "length_penalty", "early_stopping")
# Field -> why it cannot stand beside a beam search. Values that change nothing can.
_BESIDE = {
    "stream": "the best answers are known at the end only; leave it out",
    "session_id": "its answers have no log to be continued; leave it out",
    "stop": "answers end at end tokens and stop_token_ids; leave it out",
    "temperature": "nothing is sampled; leave it out or send 0",
    "tools": "answers are plain text; leave it out",
}


def read_beams(fields: Mapping[str, Any]) -> BeamOptions | None:
    """Return the options that the fields ask for; None: no beam search. Raise ApiError. Null means unset."""
    wanted, answers = fields["use_beam_search"], fields["n"] or 1
    num_beams = fields["num_beams"] or (answers if wanted else 1)
    if wanted is False and num_beams > 1:
        raise invalid_field(
            "use_beam_search", f"it is false and num_beams is {num_beams}; send one of the two"
        )
    if not wanted and num_beams == 1:
        _check_unused(fields)
        return None
    if answers > num_beams:
        raise invalid_field(
            "n", f"{num_beams} beams have at most {num_beams} answers, not {answers}"
        )
    if fields["max_tokens"] == 0:
        raise invalid_field("max_tokens", "a beam search generates at least 1 token")
    for name, reason in _BESIDE.items():
        if fields.get(name):
            raise invalid_field(name, f"beside a beam search {reason}")
    penalty = fields["length_penalty"]
    stopping = fields["early_stopping"]
    return BeamOptions(
        num_beams,
        1.0 if penalty is None else float(penalty),
        False if stopping is None else stopping,
    )


def _check_unused(fields: Mapping[str, Any]) -> None:
    for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
        if fields[name] not in (None, neutral):
            raise invalid_field(
                name, "it concerns beam search; send num_beams or use_beam_search, too"
            )
