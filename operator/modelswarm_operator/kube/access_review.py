"""What the operator's account must be allowed to do, and what of it is missing.

Asked by `main` before this process tries to lead, and again while something is missing: without a right kopf would end
over and over, and nobody would know why. The chart's roles are tested against `needs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from modelswarm.kube.client import KubeClient
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

MAX_CONCURRENT_REVIEWS = 8


@dataclass(frozen=True, slots=True)
class Permission:
    kind: Kind
    verb: str
    subresource: str = ""
    optional: bool = False  # something is left out without it

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


@dataclass(frozen=True, slots=True)
class MissingPermission:
    permission: Permission
    namespace: str | None

    def __str__(self) -> str:
        group = f".{self.permission.kind.group}" if self.permission.kind.group else ""
        everywhere = "in all namespaces" if self.permission.kind.namespaced else "in the cluster"
        where = f"in namespace {self.namespace}" if self.namespace else everywhere
        return f"{self.permission.verb} {self.permission.resource}{group} {where}"


def swarm_permissions() -> Iterator[Permission]:
    """In the namespaces of the swarms; nodes and the lease stand apart."""
    for verb in ("get", "list", "watch", "patch"):
        yield Permission(SWARM, verb)
    yield Permission(SWARM, "update", "status")
    yield Permission(SWARM, "update", "finalizers")  # where blockOwnerDeletion is enforced
    for verb in ("get", "list", "watch", "create", "patch", "delete"):
        yield Permission(POD, verb)
    for kind in (SERVICE, BUDGET):
        for verb in ("get", "list", "watch", "create", "patch", "delete"):
            yield Permission(kind, verb)
    yield Permission(EVENT, "create", optional=True)


def lease_permissions() -> Iterator[Permission]:
    for verb in ("get", "create", "update"):
        yield Permission(LEASE, verb)


def node_permissions() -> Iterator[Permission]:
    for verb in ("list", "watch"):
        yield Permission(NODE, verb, optional=True)


async def find_missing_permissions(
    client: KubeClient, namespaces: Sequence[str], lease_namespace: str, lease_name: str
) -> list[MissingPermission]:
    """Raises KubeError if the API server cannot be asked. Of leases, only our own is asked for by name."""
    asked: list[tuple[Permission, str | None]] = []
    names = {("get", LEASE): lease_name, ("update", LEASE): lease_name}  # a create has no name yet
    for namespace in namespaces or (None,):
        asked += [(need, namespace) for need in swarm_permissions()]
    if lease_namespace:
        asked += [(need, lease_namespace) for need in lease_permissions()]
    asked += [(need, None) for need in node_permissions()]
    room = asyncio.Semaphore(MAX_CONCURRENT_REVIEWS)
    answers = await asyncio.gather(
        *(
            _is_allowed(client, room, need, namespace, names.get((need.verb, need.kind), ""))
            for need, namespace in asked
        )
    )
    return [
        MissingPermission(need, namespace)
        for (need, namespace), allowed in zip(asked, answers, strict=True)
        if not allowed
    ]


async def _is_allowed(
    client: KubeClient, room: asyncio.Semaphore, need: Permission, namespace: str | None, name: str
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
        answer = await client.send("POST", REVIEW.path(), body)
    return bool((answer.get("status") or {}).get("allowed"))
