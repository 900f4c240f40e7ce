"""Names, labels and annotations of everything the operator makes.

`manifests` writes them, `fleet` reads them back. Those that the gateway reads too are in `modelswarm.resources.labels`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from modelswarm.resources.labels import DOMAIN as DOMAIN
from modelswarm.resources.labels import INCARNATION as INCARNATION
from modelswarm.resources.labels import ROLE as ROLE
from modelswarm.resources.labels import SERVED_NAME as SERVED_NAME
from modelswarm.resources.labels import SERVER as SERVER

FINALIZER = f"{DOMAIN}/drain"

SWARM = f"{DOMAIN}/swarm"
SWARM_UID = f"{DOMAIN}/swarm-uid"
SPAN = f"{DOMAIN}/span"
SLOT = f"{DOMAIN}/slot"

BLOCKS = f"{DOMAIN}/blocks"
TEMPLATE_HASH = f"{DOMAIN}/plan"
POOL = f"{DOMAIN}/pool"
MODEL_HASH = f"{DOMAIN}/generation"
CHAT_TEMPLATE = f"{DOMAIN}/chat-template"

KEEP = f"{DOMAIN}/keep"
PROTECT = f"{DOMAIN}/protect"
RECONCILE_AT = f"{DOMAIN}/reconcile-at"

INSPECT = "inspect"  # roles beside SERVER
KEPT = "kept"  # taken out of service to be looked at

INSPECT_SLOT = "inspect"

CONTAINER = "server"  # the container of ours in server and inspection pods


class SlotKey(NamedTuple):
    span: int
    ordinal: int

    def __str__(self) -> str:
        return f"{self.span}-{self.ordinal}"


def parse_slot(text: str) -> SlotKey | None:
    span, dash, ordinal = text.partition("-")
    if not dash or not _is_number(span) or not _is_number(ordinal):
        return None
    return SlotKey(int(span), int(ordinal))


def parse_number(text: str) -> int:
    """0 for whatever is no number."""
    return int(text) if _is_number(text) else 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def pod_name(swarm: str, uid: str, part: str, incarnation: int) -> str:
    """`part`: s0, s1, ... or inspect. The hash keeps two swarms of one name apart, one after the other."""
    digest = hashlib.sha256(uid.encode()).hexdigest()[:5]
    return f"{swarm}-{digest}-{part}-{incarnation}"


def incarnation_of_name(name: str) -> int:
    return parse_number(name.rpartition("-")[2])


def service_name(swarm: str) -> str:
    return f"{swarm}-servers"


def budget_name(swarm: str, span: int) -> str:
    return f"{swarm}-s{span}"


def is_true(value: str | None) -> bool:
    return (value or "").strip().lower() == "true"


def reconcile_request(annotations: Mapping[str, str]) -> str:
    """What a person set to have everything tried at once; any new value will do."""
    return annotations.get(RECONCILE_AT, "")[:64]
