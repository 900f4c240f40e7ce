"""The grpcurl commands of docs/reference/grpc.md: each symbol and body by the reflection of a real gateway.

grpcurl itself is not needed. The tests do as it does: they read the descriptors from the server, and parse each JSON
document as the method's request.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, Parse, ParseError
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from support.processes.swarm import MODEL, Endpoints

PAGE = (Path(__file__).parents[3] / "docs/reference/grpc.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(grpcurl .*?)```", PAGE, re.DOTALL)
COMMANDS = [
    f"grpcurl {each}".strip()
    for each in "\n".join(BLOCKS).replace("\\\n", "").split("grpcurl ")[1:]
]
ADDRESS = "127.0.0.1:8001"
CALLS = [each for each in COMMANDS if "/" in each]


class Reflection:
    """The services of a gateway, as it describes them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self.pool = DescriptorPool(self._database)

    def services(self) -> list[str]:
        return list(self._database.get_services())

    def call(self, symbol: str, bodies: list[Any]) -> list[dict[str, Any]]:
        """Send the bodies to `service/method`; return all answers."""
        service, _, name = symbol.partition("/")
        method = self.pool.FindServiceByName(service).methods_by_name[name]
        kind = GetMessageClass(method.input_type)
        requests = [Parse(json.dumps(body), kind(), descriptor_pool=self.pool) for body in bodies]
        return [
            MessageToDict(each, descriptor_pool=self.pool) for each in self._run(method, requests)
        ]

    def _run(self, method: MethodDescriptor, requests: list[Message]) -> Iterator[Message]:
        assert method.client_streaming or len(requests) == 1, method.full_name
        options = {
            "request_serializer": lambda message: message.SerializeToString(),
            "response_deserializer": GetMessageClass(method.output_type).FromString,
        }
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.client_streaming:
            yield from self._channel.stream_stream(path, **options)(iter(requests), timeout=60)
        elif method.server_streaming:
            yield from self._channel.unary_stream(path, **options)(requests[0], timeout=60)
        else:
            yield self._channel.unary_unary(path, **options)(requests[0], timeout=60)


def documents(text: str) -> list[Any]:
    """Return the JSON documents of `-d`, one after the other."""
    found, rest = [], text.strip()
    while rest:
        made, end = json.JSONDecoder().raw_decode(rest)
        found.append(made)
        rest = rest[end:].strip()
    return found


def arguments(command: str) -> tuple[list[Any], list[str]]:
    """Return the bodies of a command, and what follows the address."""
    program, plain, *rest = shlex.split(command)
    assert (program, plain) == ("grpcurl", "-plaintext")
    bodies: list[Any] = [{}]
    if rest[0] == "-d":
        bodies, rest = documents(rest[1].replace('"toy"', f'"{MODEL}"')), rest[2:]
    assert rest[0] == ADDRESS
    return bodies, rest[1:]


@pytest.fixture
def reflection(endpoints: Endpoints) -> Iterator[Reflection]:
    with grpc.insecure_channel(endpoints.grpc) as channel:
        yield Reflection(channel)


def test_page_has_commands_for_the_main_calls() -> None:
    assert {"Generate", "GenerateStream", "Session", "Tokenize"} <= {
        call.rpartition("/")[2] for call in CALLS
    }


def test_listed_and_described_symbols_exist(reflection: Reflection) -> None:
    assert "modelswarm.v1.Inference" in reflection.services()
    for command in COMMANDS:
        _, (verb, *symbols) = arguments(command)
        assert verb in ("list", "describe") or command in CALLS, command
        for symbol in symbols:
            assert reflection.pool.FindMessageTypeByName(symbol).fields


@pytest.mark.parametrize("command", CALLS, ids=[each.rpartition("/")[2] for each in CALLS])
def test_command_is_answered(reflection: Reflection, command: str) -> None:
    bodies, [symbol] = arguments(command)
    answers = reflection.call(symbol, bodies)
    assert answers
    if symbol.endswith("/Session"):
        kinds = [next(kind for kind in answer if kind != "position") for answer in answers]
        assert (kinds[0], kinds[-2:]) == ("state", ["state", "closed"])
        assert answers[-2]["position"] == bodies[2]["rewind"]["position"]


def test_unknown_field_is_found_by_its_name(reflection: Reflection) -> None:
    """The bodies are checked: a wrong one would not pass."""
    with pytest.raises(ParseError, match="promt"):
        reflection.call("modelswarm.v1.Inference/Generate", [{"promt": "x"}])
