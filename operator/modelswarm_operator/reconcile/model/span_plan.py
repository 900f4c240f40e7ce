"""The layout of a swarm: spans of the model and the hash of each server pod's template.

Made once per turn. A plan that was stored for the same input is used as it is. So neither a restart nor another
version of the operator moves a span. A new plan is made by the placement that `modelswarm up` uses. Knows no pod.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelswarm.errors import UserError
from modelswarm.placement.memory import ServerMemory, adapter_bytes
from modelswarm.placement.plan import plan_swarm, pool_hardware
from modelswarm.placement.quantity import quantity_of
from modelswarm.placement.spans import Span
from modelswarm.resources.spec import (
    API_VERSION,
    KIND,
    Metadata,
    Model,
    ModelSwarm,
    Pool,
    Spec,
    servers_fault,
)
from modelswarm.resources.status import ModelStatus, PlannedMemory, PlannedSpan, PlanStatus
from modelswarm_operator.reconcile.model.facts import facts_of, is_from_hub, pinned_address
from modelswarm_operator.reconcile.model.node_accelerators import (
    NO_ACCELERATORS,
    NodeAccelerators,
)

RENDER_REVISION = 1
"""To be increased when pods of older operators must be replaced. Any other change in `manifests` reaches a pod when it
is replaced for another reason: an upgrade of the operator moves no pod."""

CACHE_MARGIN_BYTES = (
    1 << 30
)  # of a hub cache, beside a fifth of the weights: tokenizers and partly used files

DEFAULT_POOL = Pool.model_construct(name="default")


@dataclass(frozen=True, slots=True)
class Layout:
    plan: PlanStatus
    blocks: tuple[str, ...]  # "0:4", by span
    pools: tuple[Pool, ...]  # at least one
    template_hashes: Mapping[
        tuple[int, str], str
    ]  # (span, pool): hash of everything the pod is made from
    model_hash: str  # equal for servers that can share a route: the model and how it is computed
    source: str
    served_name: str
    max_length: int
    cache_limit: int  # bytes of the hub cache of a server: all weight files, adapters and a margin
    cache_requests: tuple[int, ...]  # bytes that a server of each span downloads; 0: none

    @property
    def spans(self) -> tuple[PlannedSpan, ...]:
        return self.plan.spans

    @property
    def dtype(self) -> str:
        return self.plan.dtype

    def is_current(self, span: int, pool: str, template_hash: str) -> bool:
        """Return True if a pod with this template hash is what its span and pool need now."""
        return self.template_hashes.get((span, pool)) == template_hash


def make_layout(
    name: str,
    spec: Spec,
    known: ModelStatus,
    stored: PlanStatus | None,
    accelerators: NodeAccelerators = NO_ACCELERATORS,
) -> Layout:
    """Raises UserError if spec and model do not fit together.

    `accelerators`: what the nodes tell about them; only a new plan uses it.
    """
    shared = _shared_input(name, spec, known)
    digest = _digest({**shared, "spans": _dump(spec.spans), "pools": [_dump(p) for p in spec.pools],
                      "concurrent": spec.sessions.concurrent})  # fmt: skip
    if stored is not None and stored.hash == digest and stored.spans and stored.dtype:
        plan = stored
    else:
        plan = _make_plan(name, spec, known, digest, accelerators)
    spans = plan.spans
    if fault := servers_fault(len(spans), spec.replicas):  # a stored plan knew other replicas
        raise UserError("spec.replicas", fault)
    pools = spec.pools or (DEFAULT_POOL,)
    # Templates are long, and a large swarm has thousands of pairs: each part is hashed once.
    shared["dtype"] = plan.dtype
    common = _digest(shared)
    by_pool = {pool.name: _digest(_dump(pool)) for pool in pools}
    template_hashes = {
        (span.index, pool.name): _digest(
            {"shared": common, "first": span.first, "last": span.last, "pages": span.pages,
             "pool": by_pool[pool.name]}
        )
        for span in spans
        for pool in pools
    }  # fmt: skip
    adapters = _adapter_files(spec.model, known)
    return Layout(
        plan=plan,
        blocks=tuple(f"{span.first}:{span.last}" for span in spans),
        pools=pools,
        template_hashes=template_hashes,
        model_hash=_digest({key: shared[key] for key in ("source", "served", "model", "dtype")}),
        source=shared["source"],
        served_name=shared["served"],
        max_length=spec.sessions.max_length or known.context,
        cache_limit=_with_margin(adapters + (known.file_bytes if is_from_hub(known.source) else 0)),
        cache_requests=_cache_requests(known, spans, adapters),
    )


def _with_margin(size: int) -> int:
    return size + size // 5 + CACHE_MARGIN_BYTES


def _adapter_files(model: Model, known: ModelStatus) -> int:
    """Return the most bytes that the adapters of a hub have: weights of the largest rank in float32."""
    count = sum(is_from_hub(adapter.source) for adapter in model.adapters)
    if not count:
        return 0
    span = Span(0, known.blocks)
    return adapter_bytes(facts_of(known), span, "float32", count, model.max_lora_rank)


def _cache_requests(
    known: ModelStatus, spans: Sequence[PlannedSpan], adapters: int
) -> tuple[int, ...]:
    """A server downloads only the files with its blocks, of which the first and the last may have others too.

    `adapters`: bytes of those that it downloads.
    """
    if not is_from_hub(known.source):
        return (_with_margin(adapters) if adapters else 0,) * len(spans)
    facts = facts_of(known)
    sizes = (facts.weight_bytes(span.first, span.last, facts.dtype) for span in spans)
    return tuple(_with_margin(adapters + size) for size in sizes)


def _shared_input(name: str, spec: Spec, known: ModelStatus) -> dict[str, Any]:
    """Return the user's input and the model's identity, and nothing that a version of the operator computes."""
    return {
        "render": RENDER_REVISION,
        "source": pinned_address(known),
        "served": spec.model.served_name or name,
        "model": _dump(spec.model),
        "maxLength": spec.sessions.max_length,
        **({"training": given} if (given := _dump(spec.training)) else {}),
    }


def _make_plan(
    name: str, spec: Spec, known: ModelStatus, digest: str, accelerators: NodeAccelerators
) -> PlanStatus:
    document = ModelSwarm.model_construct(
        api_version=API_VERSION, kind=KIND, metadata=Metadata.model_construct(name=name), spec=spec
    )
    plan = plan_swarm(
        document,
        facts_of(known),
        pinned_address(known),
        hardware=pool_hardware(spec, accelerators.capability),
        node_memory=accelerators.memory,
    )
    spans = tuple(
        PlannedSpan(
            index=index,
            first=server.span.first,
            last=server.span.last,
            pages=server.pages,
            memory=_memory_status(server.memory),
            host=None if server.host is None else _memory_status(server.host),
        )
        for index, server in enumerate(plan.servers)
    )
    return PlanStatus(hash=digest, dtype=plan.dtype, dtype_reason=plan.dtype_reason, spans=spans)


def _memory_status(memory: ServerMemory) -> PlannedMemory:
    return PlannedMemory(
        process=quantity_of(memory.process),
        weights=quantity_of(memory.weights),
        activations=quantity_of(memory.activations),
        grammars=quantity_of(memory.grammars),
        retained_rows=quantity_of(memory.retained),
        margin=quantity_of(memory.margin),
        kv=quantity_of(memory.kv),
        total=quantity_of(memory.total),
        adapters=quantity_of(memory.adapters) if memory.adapters else None,
        training=quantity_of(memory.training) if memory.training else None,
    )


def _dump(part: Any) -> Any:
    """Leave out defaults, so that a field that a later version adds does not change the hash."""
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
