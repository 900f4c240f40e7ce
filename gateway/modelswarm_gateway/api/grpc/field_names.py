"""Names of api.proto for the fields that errors name: both APIs share the checks, and so the sentences, of HTTP.

Used wherever a servicer answers with an ApiError. Knows no values.
"""

from __future__ import annotations

import re

from google.protobuf.descriptor import Descriptor

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.resumption import LAST_EVENT_ID

# Field of an HTTP request -> its place in a message of api.proto; all others have one name.
_PLACES = {
    **{field.name: f"sampling.{field.name}" for field in api_pb2.Sampling.DESCRIPTOR.fields},
    "messages": "chat.messages",
    "add_generation_prompt": "chat.add_generation_prompt",
    "continue_final_message": "chat.continue_final_message",
    "chat_template_kwargs": "chat.chat_template_kwargs",
    "documents": "chat.documents",
    LAST_EVENT_ID: "resume_after",
}
_FIRST_NAME = re.compile(r"[\w-]+")


def rename_field(error: ApiError) -> ApiError:
    """Return the error with the field's place in the message of api.proto, in `param` and at the sentence's start."""
    found = _FIRST_NAME.match(error.param or "")
    if found is None or found[0] not in _PLACES:
        return error
    return _replace_start(error, found[0], _PLACES[found[0]])


def move_field(error: ApiError, parent: str, message: Descriptor) -> ApiError:
    """Return the error of a field of `message`, which is the field `parent` of a larger one."""
    found, names = _FIRST_NAME.match(error.param or ""), message.fields_by_name
    if found is None or (found[0] not in names and found[0] not in message.oneofs_by_name):
        return error
    return _replace_start(error, found[0], f"{parent}.{found[0]}")


def _replace_start(error: ApiError, name: str, place: str) -> ApiError:
    message = error.message
    if message.startswith(name):
        message = place + message.removeprefix(name)
    param = place + (error.param or "").removeprefix(name)
    return ApiError(error.code, message, param=param, retry_after=error.retry_after)
