"""The events of a simulated world as text, recorded only when a seed is replayed to explain a violation.

Sessions are recognised in messages by the handles in their Fences and FenceAcks.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from modelswarm.protocol.identity import Epoch, Handle
from modelswarm.protocol.messages import Fence, FenceAck


class Violation(AssertionError):
    """An oracle found a broken guarantee. `session` is the session that shows it, if it is one."""

    def __init__(self, text: str, session: str = "") -> None:
        super().__init__(text)
        self.session = session


class Trace:
    """Off by default: a note then costs one test of a flag."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self._events: list[tuple[float, str, str, object]] = []
        self._names: dict[Handle, str] = {}

    def note(self, now: float, process: str, event: str, about: object = "") -> None:
        if self.enabled:
            self._learn(about)
            self._events.append((now, process, event, about))

    def _learn(self, item: object) -> None:
        if isinstance(item, Fence) and item.create is not None:
            self._names[item.gateway_handle] = item.create.session
        elif isinstance(item, FenceAck) and item.handle in self._names:
            self._names[item.server_handle] = self._names[item.handle]

    def session_of(self, about: object) -> str:
        session = getattr(about, "session", None)
        if session is None:
            session = self._names.get(getattr(about, "handle", 0), "")
        return str(session)

    def lines(self, session: str = "", last: int | None = None) -> list[str]:
        """Return the last events of one session and those of no session, such as faults; or all events."""
        owned = [(event, self.session_of(event[3])) for event in self._events]
        matching = [
            (event, owner) for event, owner in owned if not session or owner in ("", session)
        ]
        shown = matching if last is None else matching[-last:]
        return [
            f"{now:10.5f}  {process:<14} {event:<22} {owner:<4} {describe(about)}"
            for (now, process, event, about), owner in shown
        ]


def describe(value: object) -> str:
    """Return one line, without fields that have their default."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Epoch):
        return f"e{value.counter}"
    if isinstance(value, bytes | memoryview):
        return f"<{len(value)} bytes>"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _describe_fields(value)
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return f"[{', '.join(describe(each) for each in value)}]"
    return str(value)


def _describe_fields(value: Any) -> str:
    parts = []
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if field.default is not dataclasses.MISSING and content == field.default:
            continue
        if field.name in ("handle", "server_handle", "gateway_handle"):
            content = f"{content % 0xFFFF:04x}" if content else 0
        parts.append(f"{field.name}={describe(content)}")
    return f"{type(value).__name__}({', '.join(parts)})"
