"""The CRD's schema of `podTemplate`: a patch over a pod, of which the API server checks only the outermost fields.

A pod's whole schema has 387 KB, more than `kubectl apply` can carry, so inner fields are preserved unchecked. The
common fields are named, so that `kubectl explain` shows them. The operator creates pods with strict field validation,
so that a misspelt field becomes a condition. Types stay open: a strategic-merge patch may also contain `null` and
`$patch`. Used by `spec`.
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
        "Rules for the choice of nodes, in addition to the operator's spreading over failure domains.",
    ),
    ("tolerations", _LIST, "Taints that the servers accept."),
    ("topologySpreadConstraints", _LIST, "Additional spreading rules; merged by topologyKey."),
    ("priorityClassName", _TEXT, "Priority class: pods of a lower one may be evicted for these."),
    ("runtimeClassName", _TEXT, "Container runtime, such as nvidia."),
    ("schedulerName", _TEXT, "Scheduler to use instead of the default one."),
    (
        "serviceAccountName",
        _TEXT,
        "Service account; servers need none, and get its token only with automountServiceAccountToken.",
    ),
    ("imagePullSecrets", _LIST, "Secrets of image registries; merged by name."),
    (
        "resourceClaims",
        _LIST,
        "Devices that the pod claims (dynamic resource allocation); merged by name. They count as an accelerator.",
    ),
    ("volumes", _LIST, "Additional volumes; merged by name."),
    (
        "containers",
        _LIST,
        "Merged by name: `server` is the block server, with the accelerator of the pool's limits; others are sidecars.",
    ),
    ("initContainers", _LIST, "Containers that run before the server starts; merged by name."),
    (
        "securityContext",
        _OBJECT,
        "Merged into the operator's, which meets the Pod Security level `restricted`.",
    ),
    ("hostAliases", _LIST, "Entries of /etc/hosts; merged by ip."),
    ("dnsPolicy", _TEXT, "DNS policy of the pod."),
    ("dnsConfig", _OBJECT, "DNS servers, search domains and resolver options."),
]

POD_TEMPLATE: dict[str, Any] = {
    "properties": {
        "metadata": {
            "type": "object",
            "description": "Labels and annotations to add; those of modelswarm.io and app.kubernetes.io are kept.",
            "properties": {
                "labels": _LABELS | {"description": "Labels to add to the pods."},
                "annotations": _LABELS | {"description": "Annotations to add to the pods."},
            },
        },
        "spec": {
            "type": "object",
            "description": "The patch over the pod's spec; any field of a pod. The operator overrides restartPolicy, "
            "terminationGracePeriodSeconds (set by spec.rollout.drainTimeout), and the server's own command, arguments "
            "and ports.",
            "properties": {name: kind | {"description": text} for name, kind, text in _SPEC},
            **_OPEN,
        },
    },
}
