"""What the CRD says of `podTemplate`: a patch over a pod, of which the API server checks only the outermost fields.

Used by `resources`. The whole schema of a pod has 387 KB, more than `kubectl apply` can carry, so everything inside is
kept as it is; what people reach for is named, so that `kubectl explain` shows it. The operator tries a pod out
(dry run) before it rolls one. Types stay open: a strategic-merge patch may also say `null` and `$patch`.
"""

from __future__ import annotations

from typing import Any

_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 16384}}

_SPEC = {
    "nodeSelector": "Labels that nodes must have.",
    "affinity": "Rules for the choice of nodes; the operator adds its own spreading of servers over failure domains.",
    "tolerations": "Taints that the servers accept.",
    "topologySpreadConstraints": "Further rules for spreading.",
    "priorityClassName": "Which pods make room for which.",
    "runtimeClassName": "Container runtime, such as nvidia.",
    "schedulerName": "Another scheduler than the default one.",
    "serviceAccountName": "A service account; servers need none, and get no token.",
    "imagePullSecrets": "Secrets of image registries.",
    "volumes": "Further volumes; merged by name.",
    "containers": "Merged by name: `server` is the block server. A name of your own adds a sidecar.",
    "initContainers": "What runs before the server starts; merged by name.",
    "securityContext": "Merged into the operator's, which meets the Pod Security level restricted.",
    "hostAliases": "Entries of /etc/hosts.",
    "dnsPolicy": "Where names are looked up.",
    "dnsConfig": "How names are looked up.",
}

POD_TEMPLATE: dict[str, Any] = {
    "properties": {
        "metadata": {
            "type": "object",
            "description": "Labels and annotations to add; those of modelswarm.io and app.kubernetes.io stay.",
            "properties": {
                "labels": _LABELS | {"description": "Labels to add to the pods."},
                "annotations": _LABELS | {"description": "Annotations to add to the pods."},
            },
        },
        "spec": {
            "type": "object",
            "description": "The patch over the pod's spec; any field of a pod. Kept by the operator whatever is said "
            "here: restartPolicy, terminationGracePeriodSeconds (spec.rollout.drainLimit says it), and the server's "
            "own arguments, ports and probes.",
            "properties": {name: _OPEN | {"description": said} for name, said in _SPEC.items()},
            **_OPEN,
        },
    },
}
