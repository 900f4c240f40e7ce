"""The CustomResourceDefinition of ModelSwarm around the schemas of its spec and status.

Used by `make_crd.py` and by tests that install it. The types say what a field means; here stands what belongs to the
resource as a whole: names, columns, subresources, rules about the name and about changes.
"""

from __future__ import annotations

from typing import Any

from modelswarm.resources.rules import NAME, SERVED_NAME_IMMUTABLE, CelRule
from modelswarm.resources.spec import API_VERSION, KIND, MAX_NAME, ModelSwarm, Spec
from modelswarm.resources.status import Status
from tools.crd.schema import VALIDATIONS, Schema, structural, undescribed

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "modelswarms"

_NAME_FITS = CelRule(
    NAME.cel.replace("self", "self.metadata.name") + f" && size(self.metadata.name) <= {MAX_NAME}",
    f"metadata.name also names a Service: {NAME.allowed}, at most {MAX_NAME} characters",
)

_COLUMNS = [
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0, "Whether clients are answered."),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0, "Why, in one word."),
    ("Model", "string", ".spec.model.source", 0, "Where the weights are."),
    ("Coverage", "string", ".status.coverageText", 0, "Ready servers of the worst block over wanted ones."),
    ("Replicas", "integer", ".spec.replicas", 0, "Wanted servers per span."),
    ("URL", "string", ".status.url", 0, "Where clients reach it inside the cluster."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Since the swarm was created."),
    ("Served", "string", ".status.servedName", 1, "What clients give as `model`."),
    ("Spans", "string", ".status.spansText", 1, "Blocks of each span, ready over wanted servers."),
]  # fmt: skip


def definition() -> Schema:
    """The whole manifest. AssertionError when a field has no description."""
    schema = _schema()
    silent = undescribed(_body(schema))
    assert not silent, f"no description: {', '.join(silent)}"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": "modelswarm",
                "shortNames": ["msw"],
                "categories": ["ai"],
            },
            "scope": "Namespaced",
            "versions": [_version(schema)],
        },
    }


def _body(schema: Schema) -> Schema:
    """Without metadata, of which Kubernetes itself tells the meaning."""
    fields = {name: child for name, child in schema["properties"].items() if name != "metadata"}
    return {"properties": fields}


def _version(schema: Schema) -> Schema:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {"openAPIV3Schema": schema},
    }


def _schema() -> Schema:
    spec, status = structural(Spec), structural(Status, defaults=False)
    spec["description"] = str(ModelSwarm.model_fields["spec"].description)
    status["description"] = "What is, as the operator last saw it. Nobody else writes it."
    return {
        "description": ModelSwarm.__doc__,
        "type": "object",
        "required": ["spec"],
        VALIDATIONS: [rule.as_json() for rule in (_NAME_FITS, SERVED_NAME_IMMUTABLE)],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Always {GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"Always {KIND}."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }


def _column(name: str, kind: str, path: str, priority: int, description: str) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})
