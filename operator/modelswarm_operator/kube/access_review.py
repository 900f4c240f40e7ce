"""The permissions that the operator's account needs, and those that it lacks.

Called by `app` before this process tries to lead, and again while one is missing. Without a permission kopf would end
over and over without a reason in the log. The chart's roles are tested against these lists.
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
    optional: bool = False  # a part is left out without it

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
    """Permissions in the namespaces of the swarms; those for nodes and the Lease are separate."""
    for verb in ("get", "list", "watch", "patch"):
        yield Permission(SWARM, verb)
    yield Permission(SWARM, "update", "status")
    yield Permission(SWARM, "update", "finalizers")  # needed where blockOwnerDeletion is enforced
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
    """Return the missing permissions; for Leases only of the one with `lease_name`. Raises KubeError."""
    checks: list[tuple[Permission, str | None]] = []
    names = {("get", LEASE): lease_name, ("update", LEASE): lease_name}  # a create has no name yet
    for namespace in namespaces or (None,):
        checks += [(permission, namespace) for permission in swarm_permissions()]
    if lease_namespace:
        checks += [(permission, lease_namespace) for permission in lease_permissions()]
    checks += [(permission, None) for permission in node_permissions()]
    room = asyncio.Semaphore(MAX_CONCURRENT_REVIEWS)
    answers = await asyncio.gather(
        *(
            _is_allowed(
                client,
                room,
                permission,
                namespace,
                names.get((permission.verb, permission.kind), ""),
            )
            for permission, namespace in checks
        )
    )
    return [
        MissingPermission(permission, namespace)
        for (permission, namespace), allowed in zip(checks, answers, strict=True)
        if not allowed
    ]


async def _is_allowed(
    client: KubeClient,
    room: asyncio.Semaphore,
    permission: Permission,
    namespace: str | None,
    name: str,
) -> bool:
    attributes = {
        "group": permission.kind.group,
        "resource": permission.kind.plural,
        "subresource": permission.subresource,
        "verb": permission.verb,
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
