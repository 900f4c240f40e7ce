"""The CustomResourceDefinition of ModelSwarm around the schemas of its spec and status.

Contains what belongs to the whole resource: names, columns, subresources, and rules about the name and about changes.
Used by `make_crd.py` and by tests that install it. The fields and their descriptions come from the types.
"""

from __future__ import annotations

from typing import Any

from modelswarm.resources.rules import (
    NAME,
    SERVED_NAME_IMMUTABLE,
    SERVERS_WITHIN_LIMIT,
    CelRule,
)
from modelswarm.resources.spec import API_VERSION, KIND, MAX_NAME, ModelSwarm, Spec
from modelswarm.resources.status import Status
from tools.crd.schema import VALIDATIONS, Schema, fields_without_description, structural_schema

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "modelswarms"

_NAME_FITS = CelRule(
    NAME.cel.replace("self", "self.metadata.name") + f" && size(self.metadata.name) <= {MAX_NAME}",
    f"metadata.name also names a Service: {NAME.allowed}, at most {MAX_NAME} characters",
)

_COLUMNS = [
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0, "True if clients are answered."),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0, "Cause, as one word."),
    ("Model", "string", ".spec.model.source", 0, "Address of the weights."),
    ("Coverage", "string", ".status.coverageText", 0, "Ready servers of the worst block over desired ones."),
    ("Replicas", "integer", ".spec.replicas", 0, "Desired servers per span."),
    ("URL", "string", ".status.url", 0, "URL of the gateway inside the cluster."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since the swarm was created."),
    ("Served", "string", ".status.servedName", 1, "Name that clients give as `model`."),
    ("Spans", "string", ".status.spansText", 1, "Blocks of each span, ready over desired servers."),
]  # fmt: skip


def build_definition() -> Schema:
    """Return the whole manifest. AssertionError if a field has no description."""
    schema = _schema()
    silent = fields_without_description(_body(schema))
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
    """Return the schema without metadata, which Kubernetes itself describes."""
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
    spec, status = structural_schema(Spec), structural_schema(Status, defaults=False)
    spec["description"] = str(ModelSwarm.model_fields["spec"].description)
    status["description"] = "Observed state, written by the operator only."
    return {
        "description": ModelSwarm.__doc__,
        "type": "object",
        "required": ["spec"],
        VALIDATIONS: [
            rule.as_json() for rule in (_NAME_FITS, SERVERS_WITHIN_LIMIT, SERVED_NAME_IMMUTABLE)
        ],
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
