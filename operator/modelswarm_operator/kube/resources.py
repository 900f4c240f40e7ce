"""The kinds of objects the operator uses: their API paths and the selectors of its own.

Used by everything that makes a path or a selector, and by `access_review`. Knows no client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelswarm.resources.spec import API_VERSION, KIND
from modelswarm_operator.reconcile.state import names

MANAGED_SELECTOR = "app.kubernetes.io/managed-by=modelswarm-operator"
FIELD_MANAGER = "modelswarm-operator"  # the name in managed fields and Events


@dataclass(frozen=True, slots=True)
class Kind:
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    selector: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the path of one object, of a namespace's objects, or of all objects (both empty)."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        where = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        rest = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{root}{where}/{self.plural}{rest}"


SWARM = Kind(names.DOMAIN, API_VERSION.partition("/")[2], "modelswarms", KIND)
POD = Kind("", "v1", "pods", "Pod", selector=names.SWARM_UID)
NODE = Kind("", "v1", "nodes", "Node", namespaced=False)
SERVICE = Kind("", "v1", "services", "Service", selector=MANAGED_SELECTOR)
BUDGET = Kind(
    "policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", selector=MANAGED_SELECTOR
)
EVENT = Kind("events.k8s.io", "v1", "events", "Event")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")
REVIEW = Kind(
    "authorization.k8s.io",
    "v1",
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    namespaced=False,
)

CHILDREN = {kind.kind: kind for kind in (SERVICE, BUDGET)}
WATCHED = (SWARM, POD, SERVICE, BUDGET, NODE)


def controller_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the owner reference of the object's controller; empty if it has none."""
    for owner in raw["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return dict(owner)
    return {}


def controller_uid(raw: dict[str, Any]) -> str:
    """Return the uid of the object's controller; "" if it has none, and then it is not ours."""
    return str(controller_of(raw).get("uid") or "")
