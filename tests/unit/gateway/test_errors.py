"""Errors for clients name servers, but not the peer identities of servers."""

from __future__ import annotations

import pytest

from modelswarm_gateway.api.messages.errors import error_body
from modelswarm_gateway.core.interface.effects import Refused
from modelswarm_gateway.core.interface.errors import PromptTooLong
from modelswarm_gateway.core.interface.turn import RefusalReason
from modelswarm_gateway.errors import from_core, from_refusal, hide_identities


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "the model failed at llama-s0-1/3/0a1b2c3d4e5f6071: NaN",
            "the model failed at llama-s0-1: NaN",
        ),
        ("link_down at a.b/12/x, silent at c/1/9", "link_down at a.b, silent at c"),
        (
            "no server holds blocks 4:8 of org/model-7b",
            "no server holds blocks 4:8 of org/model-7b",
        ),
        ("", ""),
    ],
)
def test_identity_is_shown_as_its_name(text: str, shown: str) -> None:
    assert hide_identities(text) == shown


def test_refusal_for_clients_has_no_boot_nonce() -> None:
    detail = "no token in 3 attempts: the last route ended with silent at s0/1/0a1b2c3d4e5f6071"
    refused = Refused("session", RefusalReason.FAULTS, detail, retry_after=1.0)
    assert "0a1b2c3d4e5f6071" not in from_refusal(refused).message


def test_overflow_is_told_in_the_words_that_clients_look_for() -> None:
    """LiteLLM then tries a model with a larger context, and Claude Code makes its conversation shorter."""
    error = from_core(PromptTooLong(300, 200), "messages")
    for body in (error.envelope(), error_body(error)):
        assert "prompt is too long: it has 300 tokens" in str(body)
