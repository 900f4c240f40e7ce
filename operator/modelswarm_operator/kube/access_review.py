"""What the operator's account must be allowed to do, and what of it is missing.

Asked by `main` before this process tries to lead, and again while something is missing: without a right kopf would end
over and over, and nobody would know why. The chart's roles are tested against `needs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from modelswarm_operator.kube.client import Api
from modelswarm_operator.kube.resources import (
    BUDGET,
    EVENT,
    LEASE,
    NODE,
    POD,
    REVIEW,
    SERVICE,
    SWARM,
    Kind,
)
from modelswarm_operator.reconcile.state.observed import Json

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Need:
    kind: Kind
    verb: str
    subresource: str = ""
    optional: bool = False  # something is left out without it

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


@dataclass(frozen=True, slots=True)
class Missing:
    need: Need
    namespace: str | None

    def __str__(self) -> str:
        group = f".{self.need.kind.group}" if self.need.kind.group else ""
        everywhere = "in all namespaces" if self.need.kind.namespaced else "in the cluster"
        where = f"in namespace {self.namespace}" if self.namespace else everywhere
        return f"{self.need.verb} {self.need.resource}{group} {where}"


def needs() -> Iterator[Need]:
    """In the namespaces of the swarms; nodes and the lease stand apart."""
    for verb in ("get", "list", "watch", "patch"):
        yield Need(SWARM, verb)
    yield Need(SWARM, "update", "status")
    yield Need(SWARM, "update", "finalizers")  # where blockOwnerDeletion is enforced
    for verb in ("get", "list", "watch", "create", "patch", "delete"):
        yield Need(POD, verb)
    for kind in (SERVICE, BUDGET):
        for verb in ("get", "list", "watch", "create", "patch", "delete"):
            yield Need(kind, verb)
    yield Need(EVENT, "create", optional=True)


def lease_needs() -> Iterator[Need]:
    for verb in ("get", "create", "update"):
        yield Need(LEASE, verb)


def node_needs() -> Iterator[Need]:
    for verb in ("list", "watch"):
        yield Need(NODE, verb, optional=True)


async def missing_rights(
    api: Api, namespaces: Sequence[str], lease_namespace: str, lease_name: str
) -> list[Missing]:
    """Raises ApiError if the API server cannot be asked. Of leases, only our own is asked for by name."""
    asked: list[tuple[Need, str | None]] = []
    names = {("get", LEASE): lease_name, ("update", LEASE): lease_name}  # a create has no name yet
    for namespace in namespaces or (None,):
        asked += [(need, namespace) for need in needs()]
    if lease_namespace:
        asked += [(need, lease_namespace) for need in lease_needs()]
    asked += [(need, None) for need in node_needs()]
    room = asyncio.Semaphore(AT_ONCE)
    answers = await asyncio.gather(
        *(
            _allowed(api, room, need, namespace, names.get((need.verb, need.kind), ""))
            for need, namespace in asked
        )
    )
    return [
        Missing(need, namespace)
        for (need, namespace), allowed in zip(asked, answers, strict=True)
        if not allowed
    ]


async def _allowed(
    api: Api, room: asyncio.Semaphore, need: Need, namespace: str | None, name: str
) -> bool:
    attributes = {
        "group": need.kind.group,
        "resource": need.kind.plural,
        "subresource": need.subresource,
        "verb": need.verb,
        "namespace": namespace or "",
        "name": name,
    }
    body: Json = {
        "apiVersion": REVIEW.api_version,
        "kind": REVIEW.kind,
        "spec": {"resourceAttributes": attributes},
    }
    async with room:
        answer = await api.send("POST", REVIEW.path(), body)
    return bool((answer.get("status") or {}).get("allowed"))
