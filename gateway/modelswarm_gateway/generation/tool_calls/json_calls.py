"""Reads calls that are JSON objects, {"name": ..., "arguments": {...}}, while they are generated.

Used by the families whose calls are JSON. The arguments are passed on as the model writes them.
"""

from __future__ import annotations

import json

from modelswarm_gateway.generation.tool_calls.reader import OutputReader, Sink, Steps

ARGUMENT_KEYS = ("arguments", "parameters")
_OPEN, _CLOSE = "{[", {"}": "{", "]": "["}
_SCALAR = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-.")
_BETWEEN = frozenset(":, \t\r\n")


class JsonCallReader(OutputReader):
    def _json_call(self) -> Steps[bool]:
        """Read one object. Return False, at the character that does not fit, if it has started no call."""
        if not (yield from self._accept("{")):
            return False
        is_started = has_arguments = False
        early: list[str] = []  # arguments before the name
        while True:
            yield from self._skip_space()
            if (yield from self._accept("}")):
                break
            key = yield from self._key()
            if key == "name" and not is_started:
                name = yield from self._string()
                if name is None or not self._start_call(name):
                    return False
                is_started = True
                if early:
                    self._add_arguments("".join(early))
            elif key in ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                if not (
                    yield from self._arguments(self._add_arguments if is_started else early.append)
                ):
                    return is_started
            elif key is None or not (yield from self._value(_ignore)):
                return is_started
            yield from self._skip_space()
            if not (yield from self._accept(",")) and not (yield from self._is_next("}")):
                return is_started
        if is_started and not has_arguments:
            self._add_arguments("{}")
        return is_started

    def _key(self) -> Steps[str | None]:
        """Return a key, and go behind its colon; None if there is no key."""
        key = yield from self._string()
        if key is None:
            return None
        yield from self._skip_space()
        if not (yield from self._accept(":")):
            return None
        yield from self._skip_space()
        return key

    def _arguments(self, sink: Sink) -> Steps[bool]:
        """Pass on the arguments. Some models write them as a string that has the JSON or nothing, or as null."""
        if (yield from self._is_next('"')):
            text = yield from self._string()
            if text is None:
                return False
            sink(text or "{}")
            return True
        if (yield from self._accept("null")):
            sink("{}")
            return True
        return (yield from self._value(sink))

    def _value(self, sink: Sink) -> Steps[bool]:
        """Pass on one value as it is written. Return False at a character that cannot be JSON."""
        opened: list[str] = []
        while True:
            character = yield from self._peek()
            if character == '"':
                if not (yield from self._raw_string(sink)):
                    return False
            elif character and character in _OPEN:
                opened.append(character)
                sink(self._take())
            elif character in _CLOSE and opened:
                if opened.pop() != _CLOSE[character]:
                    return False
                sink(self._take())
            elif character in _SCALAR or (character in _BETWEEN and opened):
                sink(self._take())
                if opened:
                    continue
                if (yield from self._peek()) in _SCALAR:
                    continue
            else:
                return False
            if not opened:
                return True

    def _raw_string(self, sink: Sink) -> Steps[bool]:
        """Pass on a string, which may have control characters; return False if the text ends inside it."""
        sink(self._take())
        while character := (yield from self._peek()):
            sink(_escaped(self._take()))
            if character == "\\":
                if not (yield from self._peek()):
                    return False
                sink(self._take())
            elif character == '"':
                return True
        return False

    def _string(self) -> Steps[str | None]:
        """Return the content of a string; None if there is no valid one."""
        if not (yield from self._is_next('"')):
            return None
        raw: list[str] = []
        if not (yield from self._raw_string(raw.append)):
            return None
        try:
            text = json.loads("".join(raw), strict=False)
        except ValueError:
            return None
        return str(text)


def _escaped(character: str) -> str:
    """Return a character of a string. Some models write line breaks there as they are, which JSON does not allow."""
    return json.dumps(character)[1:-1] if character < " " else character


def _ignore(text: str) -> None:
    """Take a value that means nothing here."""
