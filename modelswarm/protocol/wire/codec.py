"""Control messages to protobuf bytes and back.

Called by `frames.py` only. The mapping is driven by the dataclasses of `messages.py`. Every field
has the same name in `swarm.proto`, so a new field is written down twice and nowhere else. It is
checked when this module is imported, and compiled once into closures. Strict towards the outside:
bytes that are not exactly a message raise FrameError. It does not know what the messages mean.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

from modelswarm.protocol import messages
from modelswarm.protocol.heartbeat import MAX_LEASE_SECONDS
from modelswarm.protocol.identity import MAX_NUMBER, NO_HANDLE
from modelswarm.protocol.messages import Fence, Message, Sampling, SessionInfo
from modelswarm.protocol.sampling import find_problem
from modelswarm.protocol.wire import swarm_pb2

MAX_TEXT = 1024  # characters of a name, an address or a detail


class FrameError(ValueError):
    """Received bytes violate the protocol; the link to the peer is closed."""


class _Field(NamedTuple):
    """Conversion of one field: `put(proto, value)` and `take(proto) -> value`."""

    put: Callable[[Any, Any], None]
    take: Callable[[Any], Any]


_Record: TypeAlias = "tuple[Callable[[Any, Any], None], Callable[[Any], Any]]"
_records: dict[type, _Record] = {}


def encode(message: Message) -> bytes:
    """Return the Envelope of a message. ValueError if a field cannot hold its value, which is a bug here."""
    name, fill = _WRITERS[type(message)]
    envelope = swarm_pb2.Envelope()
    body = getattr(envelope, name)
    body.SetInParent()
    fill(message, body)
    return envelope.SerializeToString()


def decode(data: bytes | memoryview) -> Message:
    envelope = swarm_pb2.Envelope()
    try:
        envelope.ParseFromString(cast("bytes", data))
    except (DecodeError, ValueError) as error:
        raise FrameError("a control message is not an Envelope") from error
    name = envelope.WhichOneof("body")
    if name is None:
        raise FrameError("a control message of an unknown kind")
    message: Message = _READERS[name](getattr(envelope, name))
    if isinstance(message, Fence):
        _check_fence(message)
    if isinstance(message, SessionInfo):
        _check_session_info(message)
    return message


def _check_fence(fence: Fence) -> None:
    if (fence.handle == NO_HANDLE) != (fence.create is not None):
        raise FrameError("a Fence must have either a handle or a create part")
    if fence.create is not None and fence.turn is None:
        raise FrameError("a Fence that creates must have a turn")


def _check_session_info(found: SessionInfo) -> None:
    """Refuse times that no server counts: a gateway waits for the rest of the lease. NaN fails both comparisons."""
    if not 0 <= found.lease_ms <= 1000 * MAX_LEASE_SECONDS:
        raise FrameError(f"SessionInfo: lease_ms is {found.lease_ms}, not 0 to a day")
    if not found.owner_silent_ms >= 0:
        raise FrameError(f"SessionInfo: owner_silent_ms is {found.owner_silent_ms}, not at least 0")


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _scalar_field(name: str) -> _Field:
    return _Field(
        lambda proto, value: setattr(proto, name, value), lambda proto: getattr(proto, name)
    )


def _text_field(name: str) -> _Field:
    """A text without line breaks and control characters: peers log it, and show it to people and clients.

    The words of an error (`detail`) may have any. So their sender replaces them by blanks; a receiver refuses them.
    """

    def take(proto: Any) -> str:
        value: str = getattr(proto, name)
        if len(value) > MAX_TEXT or not value.isprintable():
            raise FrameError(
                f"{proto.DESCRIPTOR.name}: {name} is not a printable text of {MAX_TEXT} characters at most"
            )
        return value

    clean = printable if name == "detail" else str
    return _Field(lambda proto, value: setattr(proto, name, clean(value)), take)


def printable(text: str) -> str:
    """Return at most MAX_TEXT characters of a text, with blanks for what would end a line or change a terminal."""
    if len(text) <= MAX_TEXT and text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " for each in text[:MAX_TEXT])


def _number_field(name: str) -> _Field:
    """An unsigned number that processes count with; a `fixed64` is random bits instead, and has no bound."""

    def take(proto: Any) -> int:
        value: int = getattr(proto, name)
        if value > MAX_NUMBER:
            raise FrameError(f"{proto.DESCRIPTOR.name}: {name} is {value}, above {MAX_NUMBER}")
        return value

    return _Field(lambda proto, value: setattr(proto, name, value), take)


def _enum_field(name: str, kind: type[enum.Enum], optional: bool) -> _Field:
    prefix = _snake_case(kind.__name__).upper()
    numbers = {
        member: getattr(swarm_pb2, kind.__name__).Value(f"{prefix}_{member.name}")
        for member in kind
    }
    members = {number: member for member, number in numbers.items()}

    def put(proto: Any, value: enum.Enum | None) -> None:
        if value is not None:
            setattr(proto, name, numbers[value])

    def take(proto: Any) -> enum.Enum | None:
        number = getattr(proto, name)
        if number == 0 and optional:
            return None
        if number not in members:
            raise FrameError(f"{name}: {number} is no {kind.__name__}")
        return members[number]

    return _Field(put, take)


def _nested_field(name: str, kind: type, optional: bool) -> _Field:
    fill, read = _compile_record(kind)

    def put(proto: Any, value: Any) -> None:
        if value is not None:
            inner = getattr(proto, name)
            inner.SetInParent()
            fill(value, inner)

    def take(proto: Any) -> Any:
        if proto.HasField(name):
            return read(getattr(proto, name))
        if optional:
            return None
        raise FrameError(f"{proto.DESCRIPTOR.name}: {name} is missing")

    return _Field(put, take)


def _sequence_field(name: str, arguments: tuple[Any, ...]) -> _Field:
    kind = arguments[0]
    if typing.get_origin(kind) is tuple:
        return _tuples_field(name, typing.get_args(kind))
    if _is_record(kind):
        fill, read = _compile_record(kind)

        def put_records(proto: Any, values: Any) -> None:
            into = getattr(proto, name)
            for value in values:
                fill(value, into.add())

        return _Field(put_records, lambda proto: tuple(map(read, getattr(proto, name))))
    length = None if arguments[-1] is ... else len(arguments)

    def take(proto: Any) -> tuple[Any, ...]:
        values = tuple(getattr(proto, name))
        if length is not None and len(values) != length:
            raise FrameError(f"{proto.DESCRIPTOR.name}: {name} must have {length} values")
        if kind is int:
            _check_numbers(proto, name, values)
        return values

    return _Field(lambda proto, values: getattr(proto, name).extend(values), take)


def _tuples_field(name: str, arguments: tuple[Any, ...]) -> _Field:
    """A tuple of int sequences (`TokenSequence`), or of pairs of an int and a float (`TokenBias`)."""

    def put_sequences(proto: Any, values: Any) -> None:
        for tokens in values:
            getattr(proto, name).add(tokens=tokens)

    def take_sequences(proto: Any) -> tuple[tuple[int, ...], ...]:
        found = tuple(tuple(entry.tokens) for entry in getattr(proto, name))
        _check_numbers(proto, name, tuple(token for tokens in found for token in tokens))
        return found

    def put_pairs(proto: Any, values: Any) -> None:
        for token, bias in values:
            getattr(proto, name).add(token=token, bias=bias)

    def take_pairs(proto: Any) -> tuple[tuple[int, float], ...]:
        found = tuple((entry.token, entry.bias) for entry in getattr(proto, name))
        _check_numbers(proto, name, tuple(token for token, _ in found))
        return found

    if arguments == (int, ...):
        return _Field(put_sequences, take_sequences)
    if arguments == (int, float):
        return _Field(put_pairs, take_pairs)
    raise TypeError(f"{name}: no rule for a tuple of tuples of {arguments}")


def _check_numbers(proto: Any, name: str, values: tuple[int, ...]) -> None:
    if max(values, default=0) > MAX_NUMBER:
        raise FrameError(f"{proto.DESCRIPTOR.name}: {name} has a value above {MAX_NUMBER}")


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def _compile_field(name: str, annotation: Any, wire_type: int) -> _Field:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return _sequence_field(name, arguments)
    optional = isinstance(annotation, types.UnionType)
    kind = arguments[0] if optional else annotation
    if _is_record(kind):
        return _nested_field(name, kind, optional)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum_field(name, kind, optional)
    if kind is int and wire_type == FieldDescriptor.TYPE_UINT64:
        return _number_field(name)
    if kind is str and name == "text":
        return _scalar_field(name)  # a grammar: any lines, as many bytes as `find_problem` allows
    if kind is str:
        return _text_field(name)
    if kind in (int, float, bool, bytes) and not optional:
        return _scalar_field(name)
    raise TypeError(f"{name}: no rule for {annotation}")


def _compile_record(kind: type) -> _Record:
    """Compile (fill, read) of a dataclass or NamedTuple."""
    if kind in _records:
        return _records[kind]
    hints = typing.get_type_hints(kind)
    descriptor = getattr(swarm_pb2, kind.__name__).DESCRIPTOR
    if sorted(hints) != sorted(field.name for field in descriptor.fields):
        raise TypeError(f"{kind.__name__} and its message in swarm.proto differ in their fields")
    wire_types = {field.name: field.type for field in descriptor.fields}
    fields = [(name, _compile_field(name, hints[name], wire_types[name])) for name in hints]
    puts = [(name, field.put) for name, field in fields]
    takes = [field.take for _, field in fields]

    def fill(value: Any, proto: Proto) -> None:
        for name, put in puts:
            put(proto, getattr(value, name))

    def read(proto: Proto) -> Any:
        value = kind(*[take(proto) for take in takes])
        if isinstance(value, Sampling) and (problem := find_problem(value)) is not None:
            raise FrameError(f"Sampling: {problem}")
        return value

    _records[kind] = fill, read
    return fill, read


_WRITERS = {
    kind: (_snake_case(kind.__name__), _compile_record(kind)[0])
    for kind in typing.get_args(messages.Message)
}
_READERS = {_snake_case(kind.__name__): _compile_record(kind)[1] for kind in _WRITERS}

if set(_READERS) != {f.name for f in swarm_pb2.Envelope.DESCRIPTOR.fields}:
    raise TypeError("messages.Message and the Envelope of swarm.proto differ in their kinds")

__all__ = ["MAX_TEXT", "FrameError", "decode", "encode"]
