"""Names, labels and annotations of all objects that the operator creates.

Written by `manifests`, read back by `pods/inventory`. Those that the gateway reads too are in
`modelswarm.resources.labels`. Knows no client and no view.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from modelswarm.resources.labels import CONTAINER as CONTAINER
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
TEMPLATE_HASH = f"{DOMAIN}/template-hash"
POOL = f"{DOMAIN}/pool"
MODEL_HASH = f"{DOMAIN}/model-hash"
MODEL_BLOCKS = f"{DOMAIN}/model-blocks"
CHAT_TEMPLATE = f"{DOMAIN}/chat-template"

KEEP = f"{DOMAIN}/keep"
PROTECT = f"{DOMAIN}/protect"
RECONCILE_AT = f"{DOMAIN}/reconcile-at"

INSPECT = "inspect"  # the role of inspection pods
KEPT = "kept"  # the role of pods that are taken out of service to be examined

INSPECT_SLOT = "inspect"  # the slot of inspection pods


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
    """Return 0 for a text that is not a number."""
    return int(text) if _is_number(text) else 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def pod_name(swarm: str, uid: str, part: str, incarnation: int) -> str:
    """`part`: s0, s1, ... or inspect. The hash of the uid tells a swarm from an earlier one of the same name."""
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
    """Return the annotation by which a user asks for an immediate retry of everything; any new value is a request."""
    return annotations.get(RECONCILE_AT, "")[:64]
