"""The typed fields of the Python client are those that the gateway obeys."""

from __future__ import annotations

from modelswarm.client.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, TOKENIZE_FIELDS
from modelswarm_gateway.api.fields.openai import CHAT, COMPLETIONS
from modelswarm_gateway.api.fields.tokenization import TOKENIZE

OF_THE_METHODS = {"model", "prompt", "messages", "stream", "stream_options"}


def test_fields_of_the_client_are_those_of_the_gateway() -> None:
    assert COMPLETIONS.obeyed - OF_THE_METHODS == COMPLETION_FIELDS
    assert CHAT.obeyed - OF_THE_METHODS == CHAT_FIELDS
    assert TOKENIZE.obeyed - OF_THE_METHODS == TOKENIZE_FIELDS
