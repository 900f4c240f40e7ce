"""The Kubernetes objects of a swarm, as plain dicts: server and inspection pods, the Service, the disruption budgets.

Called by `pod_builder`, `inspection` and `owned_objects`. The pools' patches are applied in `pod_template`. Pods meet
the Pod Security level `restricted`. A change here reaches a pod when it is replaced for another reason (`span_plan`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

from modelswarm.placement.budgets import training_bytes
from modelswarm.placement.plan import PAGE_SIZE
from modelswarm.placement.quantity import quantity_of
from modelswarm.resources.accelerators import device_kind, has_accelerator
from modelswarm.resources.labels import LINKS, LINKS_PORT
from modelswarm.resources.rules import parse_quantity
from modelswarm.resources.spec import API_VERSION, KIND, Model, Pool, Spec, parse_duration
from modelswarm_operator.reconcile.model.span_plan import CACHE_MARGIN_BYTES, Layout
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.observed import Json, SwarmView
from modelswarm_operator.reconcile.state.policy import Policy

METRICS_PORT = 7001
TMP_LIMIT_BYTES = 1 << 30  # of /tmp
USER_ID = 65532
DRAIN_MARGIN_SECONDS = 5  # of a pod's grace period, for the end of the process after its drain
HUB_CACHE_DIR = "/var/cache/huggingface"
CLAIMS_DIR = "/mnt/modelswarm"
_DISK = "ephemeral-storage"
_INSPECT_REQUESTS = {"cpu": "100m", "memory": "256Mi", _DISK: quantity_of(CACHE_MARGIN_BYTES)}
ZONE_LABEL = "topology.kubernetes.io/zone"
TEMPLATE_DIR = "/etc/modelswarm"  # where the swarm's own chat template is mounted, if it has one
TEMPLATE_FILE = "chat_template.jinja"
INSPECT_SECONDS = (
    900  # deadline of an inspection: it reads headers only, so only a hanging hub takes longer
)


@dataclass(frozen=True, slots=True)
class ManifestBuilder:
    """Builds the metadata that all objects of one swarm share."""

    swarm: SwarmView
    policy: Policy

    def metadata(self, name: str, labels: dict[str, str] | None = None) -> Json:
        return {
            "name": name,
            "namespace": self.swarm.namespace,
            "labels": {**self.labels("swarm"), **(labels or {})},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": self.swarm.name,
                    "uid": self.swarm.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        }

    def labels(self, component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "modelswarm-server",
            "app.kubernetes.io/instance": self.swarm.name,
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/part-of": "modelswarm",
            "app.kubernetes.io/managed-by": "modelswarm-operator",
            names.SWARM: self.swarm.name,
            names.SWARM_UID: self.swarm.uid,
        }

    def selector(self, span: int | None = None) -> dict[str, str]:
        found = {names.SWARM_UID: self.swarm.uid, names.ROLE: names.SERVER}
        return found if span is None else {**found, names.SPAN: str(span)}


def drain_seconds(spec: Spec) -> int:
    return math.ceil(parse_duration(spec.rollout.drain_timeout))


def server_drain_seconds(spec: Spec) -> float:
    """Return the time a server may drain; the rest of the grace period is for the end of its process."""
    grace = drain_seconds(spec)
    return max(grace - DRAIN_MARGIN_SECONDS, grace / 2)


def server_pod(
    builder: ManifestBuilder,
    spec: Spec,
    layout: Layout,
    slot: SlotKey,
    pool: Pool,
    incarnation: int,
) -> Json:
    """Return the server pod before any patch."""
    name = names.pod_name(builder.swarm.name, builder.swarm.uid, f"s{slot.span}", incarnation)
    meta = builder.metadata(name)
    meta["labels"] |= {
        "app.kubernetes.io/component": names.SERVER,
        names.ROLE: names.SERVER,
        names.SPAN: str(slot.span),
        names.SLOT: str(slot),
        names.INCARNATION: str(incarnation),
    }
    meta["annotations"] = {
        names.BLOCKS: layout.blocks[slot.span],
        names.TEMPLATE_HASH: layout.template_hashes[slot.span, pool.name],
        names.POOL: pool.name,
        names.MODEL_HASH: layout.model_hash,
        names.MODEL_BLOCKS: str(layout.spans[-1].last),
        names.SLOT: str(slot),
        names.SERVED_NAME: layout.served_name,
        **_template_annotation(spec.model),
    }
    container = _server_container(builder, spec, layout, slot, pool, name, incarnation)
    body = _pod_spec(spec.model, container, layout.cache_limit)
    body |= {
        "hostname": name,
        "subdomain": names.service_name(builder.swarm.name),
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": drain_seconds(spec),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": pool.failure_domain_key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": builder.selector(slot.span)},
            }
        ],
    }
    container["resources"] = _server_resources(pool, layout.cache_requests[slot.span])
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": body}


def _server_resources(pool: Pool, cache_request: int) -> Json:
    """Return the pool's amounts, and a request for the disk that a download takes unless the pool has one."""
    resources = pool.resources.model_dump(mode="json")
    amounts: dict[str, dict[str, str]] = {
        kind: {key: str(value) for key, value in given.items()} for kind, given in resources.items()
    }
    if cache_request and not any(_DISK in given for given in amounts.values()):
        amounts["requests"][_DISK] = quantity_of(cache_request)
    return {kind: given for kind, given in amounts.items() if given}


def _server_container(
    builder: ManifestBuilder,
    spec: Spec,
    layout: Layout,
    slot: SlotKey,
    pool: Pool,
    name: str,
    incarnation: int,
) -> Json:
    span = layout.spans[slot.span]
    arguments = {
        "--model": _literal(layout.source),
        "--served-name": layout.served_name,
        "--blocks": f"{span.first}:{span.last}",
        "--listen": f"0.0.0.0:{LINKS_PORT}",
        "--advertise": f"$(POD_IP):{LINKS_PORT}",
        "--name": name,
        "--incarnation": incarnation,
        "--dtype": layout.dtype,
        "--device": device_kind(pool),
        "--threads": "auto",
        **_page_flags(spec, pool, span.pages),
        "--page-size": PAGE_SIZE,
        "--max-length": layout.max_length,
        "--hold-limit": f"{parse_duration(spec.sessions.hold_limit):g}",
        "--drain-timeout": f"{server_drain_seconds(spec):g}",
        "--metrics": f"0.0.0.0:{METRICS_PORT}",
        "--zone": "$(NODE_ZONE)",
        **_training_flags(spec),
        **tokenizer_flags(spec.model),
    }
    return {
        "name": names.CONTAINER,
        "command": ["modelswarm-server"],
        "args": [
            *(text for flag, value in arguments.items() for text in (flag, str(value))),
            *_adapter_flags(spec.model),
        ],
        "ports": [
            {"name": LINKS, "containerPort": LINKS_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        # Loading may take long (a hub, a slow disk): until the first /live, only the startup probe runs.
        "startupProbe": _probe("/live", period=1, failures=3600),
        "livenessProbe": _probe("/live", period=10, failures=6),
        "readinessProbe": _probe("/ready", period=1, failures=3),
        **_container(builder, spec.model),
    }


def _page_flags(spec: Spec, pool: Pool, pages: int) -> dict[str, int]:
    """Return the number of pages; none where the server is to fill its accelerator, which only it can measure."""
    fills_device = spec.sessions.concurrent is None and has_accelerator(pool)
    return {} if fills_device else {"--pages": pages}


def _training_flags(spec: Spec) -> dict[str, int]:
    memory = training_bytes(spec)
    return {} if memory is None else {"--training-memory": memory}


def _probe(path: str, period: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _container(builder: ManifestBuilder, model: Model) -> Json:
    env: list[Json] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        # Since Kubernetes 1.35 a placed pod has this label of its node; in earlier versions it is empty.
        {
            "name": "NODE_ZONE",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{ZONE_LABEL}']"}},
        },
        {"name": "HF_HOME", "value": HUB_CACHE_DIR},
        {"name": "HF_XET_CHUNK_CACHE_SIZE_BYTES", "value": "0"},  # would double a download
        {"name": "HOME", "value": "/tmp"},  # an emptyDir: the root file system is read-only
    ]
    if (token := model.token_secret_ref) is not None:
        reference = {"name": token.name, "key": token.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    mounts: list[Json] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "hub-cache", "mountPath": HUB_CACHE_DIR},
    ]
    mounts += [
        {"name": _claim_volume(claim), "mountPath": f"{CLAIMS_DIR}/{claim}", "readOnly": True}
        for claim in claims_of(model)
    ]
    if model.chat_template is not None:
        mounts.append({"name": "chat-template", "mountPath": TEMPLATE_DIR, "readOnly": True})
    return {
        "image": builder.policy.server_image,
        "imagePullPolicy": builder.policy.image_pull_policy,
        "env": env,
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _pod_spec(model: Model, container: Json, cache_limit: int) -> Json:
    """`cache_limit`: bytes that the hub cache may have; the kubelet evicts a pod that exceeds it."""
    volumes: list[Json] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": quantity_of(TMP_LIMIT_BYTES)}},
        {"name": "hub-cache", "emptyDir": {"sizeLimit": quantity_of(cache_limit)}},
    ]
    for claim in claims_of(model):
        source = {"claimName": claim, "readOnly": True}
        volumes.append({"name": _claim_volume(claim), "persistentVolumeClaim": source})
    if model.chat_template is not None:
        field = {"fieldPath": f"metadata.annotations['{names.CHAT_TEMPLATE}']"}
        items = [{"path": TEMPLATE_FILE, "fieldRef": field}]
        volumes.append({"name": "chat-template", "downwardAPI": {"items": items}})
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def tokenizer_flags(model: Model) -> dict[str, str]:
    """Return the flags for a tokenizer and a chat template that replace the model's own."""
    flags = {"--tokenizer": _literal(model.tokenizer)} if model.tokenizer else {}
    return flags | (
        {"--chat-template": f"{TEMPLATE_DIR}/{TEMPLATE_FILE}"} if model.chat_template else {}
    )


def _adapter_flags(model: Model) -> list[str]:
    flags = ["--max-lora-rank", str(model.max_lora_rank)] if model.adapters else []
    for adapter in model.adapters:
        flags += ["--adapters", f"{adapter.name}={_literal(adapter.source)}"]
    return flags


def _literal(text: str) -> str:
    """Return an argument that the kubelet leaves as `text`: it puts variables, also those of Secrets, for `$(NAME)`."""
    return text.replace("$", "$$")


def _template_annotation(model: Model) -> dict[str, str]:
    """Return the annotation with the template. The pod mounts it as a file, so no other object can get lost."""
    return {names.CHAT_TEMPLATE: model.chat_template} if model.chat_template else {}


def claims_of(model: Model) -> tuple[str, ...]:
    """Return the volume claims that hold weights, tokenizer and adapters."""
    addresses = [model.source, *([model.tokenizer] if model.tokenizer else [])]
    addresses += [adapter.source for adapter in model.adapters]
    claims = [urlparse(one).netloc for one in addresses if one.startswith("pvc://")]
    return tuple(dict.fromkeys(claim for claim in claims if claim))


def _claim_volume(claim: str) -> str:
    """Return the name of the claim's volume, which has no dots and at most 63 characters."""
    if "." not in claim and len(claim) <= 57:
        return f"claim-{claim}"
    digest = hashlib.sha256(claim.encode()).hexdigest()  # others may differ in the rest only
    return f"claim-{claim.replace('.', '-')[:48]}-{digest[:8]}"


def inspection_pod(
    builder: ManifestBuilder, spec: Spec, pool: Pool, address: str, key: str, incarnation: int
) -> Json:
    """Return a pod that sees the same weights, token and volumes as a server of the pool, and ends by itself."""
    name = names.pod_name(builder.swarm.name, builder.swarm.uid, names.INSPECT, incarnation)
    meta = builder.metadata(name)
    meta["labels"] |= {
        "app.kubernetes.io/component": names.INSPECT,
        names.ROLE: names.INSPECT,
        names.SLOT: names.INSPECT_SLOT,
        names.INCARNATION: str(incarnation),
    }
    meta["annotations"] = {
        names.POOL: pool.name,
        names.TEMPLATE_HASH: key,
        names.SLOT: names.INSPECT_SLOT,
        **_template_annotation(spec.model),
    }
    flags = [text for flag in tokenizer_flags(spec.model).items() for text in flag]
    container = {
        "name": names.CONTAINER,
        "command": ["modelswarm-inspect"],
        "args": ["--model", _literal(address), *flags, "--output", "/dev/termination-log"],
        "resources": _inspection_resources(pool),
        **_container(builder, spec.model),
    }
    body = _pod_spec(spec.model, container, CACHE_MARGIN_BYTES)
    body |= {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": INSPECT_SECONDS,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": body}


def _inspection_resources(pool: Pool) -> Json:
    """Return the pool's limits but its accelerator, and small requests for all that the pool has an amount of.

    A quota demands amounts of every pod. An inspection must find a node while servers fill the cluster.
    """
    given = pool.resources
    limits = {key: str(given.limits[key]) for key in _INSPECT_REQUESTS if key in given.limits}
    requests = {
        key: min(small, limits.get(key, small), key=parse_quantity)
        for key, small in _INSPECT_REQUESTS.items()
        if key in given.limits or key in given.requests
    }
    return {kind: found for kind, found in (("requests", requests), ("limits", limits)) if found}


def service(builder: ManifestBuilder) -> Json:
    """Return the headless Service. It includes servers that are not ready: they find each other before they serve."""
    ports: list[dict[str, Any]] = [
        {"name": LINKS, "port": LINKS_PORT, "targetPort": LINKS, "protocol": "TCP"},
        {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics", "protocol": "TCP"},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": builder.metadata(names.service_name(builder.swarm.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": builder.selector(),
            "ports": ports,
        },
    }


def disruption_budget(builder: ManifestBuilder, span: int, replicas: int) -> Json:
    """Return the budget of a span. It protects all its servers: an eviction waits until the operator has added one.

    `minAvailable` is an integer: Kubernetes allows nothing else for pods of a controller that it does not know. Pods
    that are not ready are never protected.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": builder.metadata(
            names.budget_name(builder.swarm.name, span), {names.SPAN: str(span)}
        ),
        "spec": {
            "minAvailable": replicas,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": builder.selector(span)},
        },
    }
