"""States of request fields, and the check of an object of a request against the table of its fields.

Every object of a request has a `FieldTable`. A field that is in no table is refused, so none can be ignored by mistake.
Null means unset for every field.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from modelswarm_gateway.errors import MAX_QUOTED, Code, shorten


@dataclass(frozen=True, slots=True)
class Obeyed:
    """The field has an effect; a model of the request has an attribute of its name."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The field is refused, unless its value is one of `harmless`: those change nothing."""

    reason: str
    harmless: tuple[object, ...] = ()

    def allows(self, value: object) -> bool:
        return any(_equal(value, allowed) for allowed in self.harmless)

    @property
    def allowed_text(self) -> str:
        return json.dumps(self.harmless[0]) if self.harmless else "null"


@dataclass(frozen=True, slots=True)
class NoEffect:
    """The field is accepted with any value: it does not concern the answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class Renamed:
    """Another server's name of the field `name`. Accepted if both have the same value."""

    name: str


State: TypeAlias = Obeyed | Refused | NoEffect | Renamed
Section: TypeAlias = Mapping[str, State]

OBEYED = Obeyed()


def refused(reason: str, *harmless: object) -> Refused:
    return Refused(reason, harmless)


class FieldError(Exception):
    """A field that is refused. The place of its object in the request is not known here."""

    def __init__(self, field: str, problem: str, code: Code) -> None:
        super().__init__(problem)
        self.field, self.problem, self.code = field, problem, code


@dataclass(frozen=True)
class FieldTable:
    """Fields of one kind of object of a request, by the API that has introduced them."""

    of: str  # the endpoint or the object
    sections: Mapping[str, Section]

    @cached_property
    def states(self) -> dict[str, State]:
        return {name: state for part in self.sections.values() for name, state in part.items()}

    @property
    def obeyed(self) -> set[str]:
        return {name for name, state in self.states.items() if isinstance(state, Obeyed)}

    def take(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that have an effect and are set. Raise FieldError for one that is refused."""
        states, taken = self.states, {}
        for name, value in values.items():
            if value is None:
                continue
            match state := states.get(name):
                case Obeyed():
                    taken[name] = value
                case NoEffect():
                    continue
                case Refused():
                    if not state.allows(value):
                        raise _unsupported(name, state)
                case Renamed(wanted):
                    if not _equal(values.get(wanted), value):
                        detail = f"not a field of this API; use {wanted}"
                        raise FieldError(name, detail, Code.UNSUPPORTED)
                case None:
                    raise self._unknown(name)
        return taken

    def _unknown(self, name: str) -> FieldError:
        near = difflib.get_close_matches(name[:MAX_QUOTED], self.states, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        problem = f"unknown field of {self.of}; {hint}"
        return FieldError(shorten(name), problem, Code.UNKNOWN_PARAMETER)


def _unsupported(name: str, state: Refused) -> FieldError:
    detail = f"{state.reason}; leave it out or send {state.allowed_text}"
    return FieldError(name, detail, Code.UNSUPPORTED)


def _equal(value: object, other: object) -> bool:
    """Return whether two JSON values are the same: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, int | float) and isinstance(other, int | float):
        return value == other
    return type(value) is type(other) and value == other
