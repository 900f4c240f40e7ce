"""The rules of a swarm document beyond types: each once in Python and once in CEL, with one message.

A field has a rule as `Annotated[..., Rule(...)]`. Pydantic checks it when a file is read; the CRD contains it as
`x-kubernetes-validations`, which the API server checks. Tests give the same values to both. Used by `spec` and
`tools/make_crd.py`. Knows no files and no API server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from modelswarm.resources.accelerators import MARKS, accelerators_of, has_accelerator

VALIDATIONS = "x-kubernetes-validations"

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_FACTORS = {
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "K": Decimal(10**3),  # not Kubernetes: only `bytes_of` lets it pass
    **{unit: Decimal(1000 ** (power + 2)) for power, unit in enumerate("MGTPE")},
    **{f"{unit}i": Decimal(1024 ** (power + 1)) for power, unit in enumerate("KMGTPE")},
}


def violation(message: str) -> PydanticCustomError:
    """Return a pydantic error with our own message, which `violations` shows unchanged."""
    return PydanticCustomError("modelswarm", "{sentence}", {"sentence": message})


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule in CEL (`cel`) and the same rule in Python (`predicate`).

    `shows_value`: messages repeat the value; False for rules on a whole part of a document.
    """

    cel: str
    allowed: str
    predicate: Callable[[Any], bool]
    shows_value: bool = True

    def check(self, value: Any) -> Any:
        if self.predicate(value):
            return value
        problem = f"{_abbreviate(value)} is not allowed" if self.shows_value else "not allowed"
        raise violation(f"{problem}; allowed: {self.allowed}")

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return _with_rule(handler(core), {"rule": self.cel, "message": f"allowed: {self.allowed}"})


@dataclass(frozen=True, slots=True)
class CelRule:
    """A rule for the API server only. Python code elsewhere checks the same, with a more precise message."""

    cel: str
    message: str
    reason: str | None = None
    field: str | None = None

    def as_json(self) -> dict[str, str]:
        fields = {"rule": self.cel, "message": self.message}
        fields |= {"reason": self.reason} if self.reason else {}
        return fields | ({"fieldPath": self.field} if self.field else {})

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return _with_rule(handler(core), self.as_json())


def matches_pattern(pattern: str, allowed: str) -> Rule:
    """Return the rule that the whole text matches `pattern`.

    The pattern must mean the same to Python and to RE2: no classes such as \\s or \\w.
    """
    compiled = re.compile(pattern)
    quoted = pattern.replace("\\", "\\\\").replace("'", "\\'")
    return Rule(
        f"self.matches('^({quoted})$')", allowed, lambda text: bool(compiled.fullmatch(text))
    )


def _with_rule(schema: Mapping[str, Any], rule: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema with one more rule. A rule goes beside a `$ref`, because the referenced schema is shared."""
    return {**schema, VALIDATIONS: [*schema.get(VALIDATIONS, ()), dict(rule)]}


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Durations


def parse_duration(duration: str) -> float:
    """Return the seconds of a duration: 90.0 for `"1m30s"`. The text must have passed DURATION."""
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(duration))


_DURATION = r"([0-9]{1,5}([.][0-9]{1,3})?(ms|s|m|h))+"
_MAX_DURATION_SECONDS = 24 * 3600.0

DURATION = Rule(
    f"self.matches('^{_DURATION}$') && duration(self) > duration('0s') && duration(self) <= duration('24h')",
    "a duration such as 500ms, 30s, 5m or 1h30m, more than 0 and at most 24h",
    lambda text: (
        re.fullmatch(_DURATION, text) is not None
        and 0 < parse_duration(text) <= _MAX_DURATION_SECONDS
    ),
)


# Addresses and names

_TEXT = r"[^\x00-\x20\x7f-\xa0]"  # neither blanks nor control characters
_NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_CLAIM = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_HUB_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"

ADDRESSES = "demo://NAME, hf://OWNER/NAME, pvc://CLAIM/PATH or file:///PATH"
ADDRESS = matches_pattern(
    "|".join(
        [
            r"demo://[a-z0-9-]+/?",
            rf"hf://{_HUB_PART}(/{_HUB_PART})?(@[^@\x00-\x20\x7f-\xa0]+)?",
            rf"pvc://{_CLAIM}(/{_TEXT}*)?",
            rf"file://(localhost)?/{_TEXT}*",
        ]
    ),
    ADDRESSES,
)
NO_PARENT_STEPS = Rule(
    "!self.matches('(^|[/@])[.][.](/|$)')",
    "a path without `..`",
    lambda text: re.search(r"(^|[/@])[.][.](/|\Z)", text) is None,
)
NAME = matches_pattern(
    _NAME, "lower-case letters, digits and dashes, a letter first and no dash last"
)
SERVED_NAME = matches_pattern(
    "[A-Za-z0-9][A-Za-z0-9._/:-]*", "letters, digits and . _ / : - , a letter or digit first"
)
REVISION = matches_pattern(
    r"[^@\x00-\x20\x7f-\xa0]+", "a branch, tag or commit, without blanks and @"
)
SECRET = matches_pattern(
    _CLAIM, "the name of a Secret: lower-case letters, digits, dashes and dots"
)
SECRET_KEY = matches_pattern("[-._a-zA-Z0-9]+", "letters, digits and - . _")
LABEL_KEY = matches_pattern(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
    "the key of a node label, such as topology.kubernetes.io/zone",
)


# Amounts

_QUANTITY = r"[0-9]{1,15}([.][0-9]{1,9})?(m|k|[MGTPE]|[KMGTPE]i)?"
_AMOUNT = re.compile(r"([0-9.]+)([a-zA-Z]*)")
_BUILT_IN = ("cpu", "memory", "ephemeral-storage")


def parse_quantity(quantity: str | int) -> Decimal:
    """Return the amount of a quantity that has passed QUANTITY or the pattern of `bytes_of`."""
    match = _AMOUNT.fullmatch(str(quantity))
    assert match is not None, quantity
    return Decimal(match[1]) * (_FACTORS[match[2]] if match[2] else 1)


QUANTITY = Rule(
    f"type(self) == int ? self >= 0 : self.matches('^{_QUANTITY}$')",
    "a quantity such as 1, 500m or 2Gi",
    lambda value: (
        value >= 0 if isinstance(value, int) else re.fullmatch(_QUANTITY, value) is not None
    ),
)


def _is_resource_name(name: str) -> bool:
    return name in _BUILT_IN or "/" in name or name.startswith("hugepages-")


RESOURCE_NAMES = Rule(
    "self.all(k, k in ['cpu', 'memory', 'ephemeral-storage'] || k.contains('/') || k.startsWith('hugepages-'))",
    "cpu, memory, ephemeral-storage, hugepages-SIZE and names with a slash, such as nvidia.com/gpu",
    lambda amounts: all(map(_is_resource_name, amounts)),
    shows_value=False,
)


def _requests_within_limits(amounts: Any) -> bool:
    return all(
        parse_quantity(wanted) <= parse_quantity(amounts.limits[name])
        for name, wanted in amounts.requests.items()
        if name in amounts.limits
    )


def _extended_resources_equal(amounts: Any) -> bool:
    return all(
        name in amounts.limits and parse_quantity(wanted) == parse_quantity(amounts.limits[name])
        for name, wanted in amounts.requests.items()
        if "/" in name
    )


_COMPARED = "quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k])))"

REQUESTS_WITHIN_LIMITS = Rule(
    "!has(self.requests) || !has(self.limits) || "
    f"self.requests.all(k, !(k in self.limits) || {_COMPARED} <= 0)",
    "requests that are not above the limits",
    _requests_within_limits,
    shows_value=False,
)
EXTENDED_RESOURCES_EQUAL = Rule(
    "!has(self.requests) || self.requests.all(k, !k.contains('/') || "
    f"(has(self.limits) && k in self.limits && {_COMPARED} == 0))",
    "a request for a resource with a slash in its name, such as nvidia.com/gpu, only with an equal limit",
    _extended_resources_equal,
    shows_value=False,
)


# Accelerators

_IS_ACCELERATOR = " || ".join(f"k.contains('{mark}')" for mark in MARKS)


def _at_most_one_accelerator(amounts: Any) -> bool:
    names = accelerators_of(amounts.limits)
    return len(names) <= 1 and all(parse_quantity(amounts.limits[name]) == 1 for name in names)


ONE_ACCELERATOR = Rule(
    f"!has(self.limits) || (self.limits.filter(k, {_IS_ACCELERATOR}).size() <= 1 && self.limits.all(k, "
    f"!({_IS_ACCELERATOR}) || quantity(string(self.limits[k])).compareTo(quantity('1')) == 0))",
    "at most one accelerator in the limits, and 1 of it, such as nvidia.com/gpu: 1, because a server computes on one; "
    "more spans or replicas use more",
    _at_most_one_accelerator,
    shows_value=False,
)
ACCELERATOR_HAS_DEVICE = Rule(
    "!has(self.accelerator) || (has(self.resources) && has(self.resources.limits) && self.resources.limits.exists(k, "
    f"{_IS_ACCELERATOR})) || (has(self.podTemplate) && has(self.podTemplate.spec) && "
    "has(self.podTemplate.spec.resourceClaims) && self.podTemplate.spec.resourceClaims.size() > 0)",
    "accelerator only in a pool with an accelerator in resources.limits, such as nvidia.com/gpu, or with "
    "resourceClaims in its podTemplate",
    lambda pool: pool.accelerator is None or has_accelerator(pool),
    shows_value=False,
)

# Whole parts

RANGE_NOT_EMPTY = CelRule(
    "self.first < self.last", "last must be greater than first: the blocks are [first, last)"
)
RANGES_FROM_ZERO = CelRule("self[0].first == 0", "the first range must begin at block 0")
RANGES_NO_OVERLAP = CelRule(
    "self.all(i, s, i == 0 || s.first >= self[i - 1].last)",
    "a range overlaps the one before it: each must begin where the one before it ends",
)
RANGES_NO_GAP = CelRule(
    "self.all(i, s, i == 0 || s.first <= self[i - 1].last)",
    "there is a gap between two ranges: each must begin where the one before it ends",
)
COUNT_OR_RANGES = CelRule(
    "!(has(self.count) && has(self.ranges))",
    "count and ranges exclude each other; allowed: one of them, or neither",
)
REVISION_ONLY_FOR_HUB = CelRule(
    "!has(self.revision) || (self.source.startsWith('hf://') && !self.source.contains('@'))",
    "allowed only with an hf:// source that does not contain a revision itself",
    field=".revision",
)

MAX_SERVERS = 4096
"""Servers of a swarm: its status names each of them, and the API server stores at most 1.5 MB in one object."""

SERVERS_WITHIN_LIMIT = CelRule(
    "self.spec.replicas * (!has(self.spec.spans) ? 1 : has(self.spec.spans.count) ? self.spec.spans.count : "
    f"has(self.spec.spans.ranges) ? size(self.spec.spans.ranges) : 1) <= {MAX_SERVERS}",
    f"replicas of all spans together; allowed: at most {MAX_SERVERS} servers of a swarm",
    field=".spec.replicas",
)

# Changes: the API server compares the new document with the stored one

_SERVED = "has({0}.spec.model.servedName) ? {0}.spec.model.servedName : {0}.metadata.name"
SERVED_NAME_IMMUTABLE = CelRule(
    "self.spec.replicas == 0 || oldSelf.spec.replicas == 0 || "
    f"({_SERVED.format('self')}) == ({_SERVED.format('oldSelf')})",
    "cannot be changed while servers run, because their sessions use it: set spec.replicas to 0 first, "
    "or create a second swarm and move the clients to it",
    reason="FieldValueForbidden",
    field=".spec.model.servedName",
)
