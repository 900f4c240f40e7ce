"""What the CRD says of `podTemplate`: a patch over a pod, of which the API server checks only the outermost fields.

Used by `resources`. The whole schema of a pod has 387 KB, more than `kubectl apply` can carry, so everything inside is
kept as it is; what people reach for is named, so that `kubectl explain` shows it. The operator creates pods with
strict field validation, so that a misspelt field becomes a condition. Types stay open: a strategic-merge patch may also
say `null` and `$patch`.
"""

from __future__ import annotations

from typing import Any

_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_TEXT = {"type": "string", "nullable": True}
_OBJECT = {"type": "object", "nullable": True, **_OPEN}
_LIST = {"type": "array", "nullable": True, "items": {"type": "object", **_OPEN}}
_LABELS = {"type": "object", "nullable": True, "additionalProperties": _TEXT}

_SPEC = [
    ("nodeSelector", _LABELS, "Labels that nodes must have."),
    (
        "affinity",
        _OBJECT,
        "Rules for the choice of nodes, beside the operator's own spreading over failure domains.",
    ),
    ("tolerations", _LIST, "Taints that the servers accept."),
    ("topologySpreadConstraints", _LIST, "Further rules for spreading; merged by topologyKey."),
    ("priorityClassName", _TEXT, "Which pods make room for which."),
    ("runtimeClassName", _TEXT, "Container runtime, such as nvidia."),
    ("schedulerName", _TEXT, "Another scheduler than the default one."),
    ("serviceAccountName", _TEXT, "A service account; servers need none, and get no token."),
    ("imagePullSecrets", _LIST, "Secrets of image registries; merged by name."),
    ("volumes", _LIST, "Further volumes; merged by name."),
    (
        "containers",
        _LIST,
        "Merged by name: `server` is the block server. A name of your own adds a sidecar.",
    ),
    ("initContainers", _LIST, "What runs before the server starts; merged by name."),
    (
        "securityContext",
        _OBJECT,
        "Merged into the operator's, which meets the Pod Security level restricted.",
    ),
    ("hostAliases", _LIST, "Entries of /etc/hosts; merged by ip."),
    ("dnsPolicy", _TEXT, "Where names are looked up."),
    ("dnsConfig", _OBJECT, "How names are looked up."),
]

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
            "properties": {name: kind | {"description": said} for name, kind, said in _SPEC},
            **_OPEN,
        },
    },
}
