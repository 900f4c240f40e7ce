"""The Service and the disruption budgets of a swarm: restored when they are edited or deleted.

Called once per turn by `serving_swarm`. Fields that the API server fills in are not a difference. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelswarm_operator.reconcile.manifests import manifests
from modelswarm_operator.reconcile.manifests.manifests import ManifestBuilder
from modelswarm_operator.reconcile.state.actions import ApplyChild, DeleteChild
from modelswarm_operator.reconcile.state.observed import Json
from modelswarm_operator.reconcile.state.turn import Turn

_SERVICE, _BUDGET = "Service", "PodDisruptionBudget"


def child_actions(
    builder: ManifestBuilder,
    stored: Mapping[tuple[str, str], Json],
    rejected: Mapping[str, str],
    turn: Turn,
    spans: Iterable[int],
    replicas: int,
) -> list[ApplyChild | DeleteChild]:
    """Return the actions for owned objects; `spans`: the numbers of those with servers.

    A suspended swarm keeps its Service, but no budgets: they would block every drain.
    """
    wanted = [manifests.service(builder)]
    if replicas > 0:
        wanted += [manifests.disruption_budget(builder, span, replicas) for span in spans]
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in wanted}
    actions: list[ApplyChild | DeleteChild] = []
    for (kind, name), manifest in by_name.items():
        what = f"{kind}/{name}"
        if _is_up_to_date(stored.get((kind, name)), manifest):
            turn.slots.pop(what, None)
        elif turn.is_due(what):
            if why := rejected.get(what):
                turn.record_rejection(what, why)
            actions.append(ApplyChild(manifest))
    for (kind, name), child in stored.items():
        if (
            (kind, name) not in by_name
            and kind in (_SERVICE, _BUDGET)
            and not _is_terminating(child)
        ):
            actions.append(DeleteChild(kind, name, child["metadata"]["uid"]))
    for what in [what for what in turn.slots if "/" in what]:
        if tuple(what.split("/", 1)) not in by_name:
            turn.slots.pop(what)
    return actions


def _is_up_to_date(stored: Json | None, manifest: Json) -> bool:
    return stored is not None and (_is_terminating(stored) or covers(stored, manifest))


def _is_terminating(child: Json) -> bool:
    return child["metadata"].get("deletionTimestamp") is not None


def covers(stored: Any, wanted: Any) -> bool:
    """Return True if `stored` has everything in `wanted`; selectors and lists must not have more."""
    if isinstance(wanted, Mapping):
        return isinstance(stored, Mapping) and all(
            key in stored and _covers_field(key, stored[key], value)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(stored, list)
            and len(stored) == len(wanted)
            and all(covers(have, want) for have, want in zip(stored, wanted, strict=True))
        )
    return bool(stored == wanted)


def _covers_field(key: str, stored: Any, wanted: Any) -> bool:
    exact = key in ("selector", "matchLabels")
    if exact and isinstance(stored, Mapping) and set(stored) != set(wanted):
        return False
    if key == "ownerReferences":  # further owners are allowed
        return all(any(covers(have, want) for have in stored) for want in wanted)
    return covers(stored, wanted)
