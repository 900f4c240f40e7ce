"""The types of a ModelSwarm's `status`, which the operator writes.

The operator builds and reads it; the CRD is generated from it together with `spec`. Reading is tolerant: another
version of the operator may have written more fields, or fewer. Times are text as Kubernetes writes them, in UTC.
Does not know how the values are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


def format_timestamp(seconds: float) -> str:
    """Return seconds since the epoch as `2026-11-21T12:00:00Z`; fractions are dropped."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> float:
    """Return the seconds since the epoch of a timestamp; also reads fractions and offsets."""
    return datetime.fromisoformat(text).timestamp()


class StatusPart(BaseModel):
    """Base of all parts of a status: camelCase in JSON, immutable; unknown fields are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="ignore",
        frozen=True,
        validate_by_alias=True,
        validate_by_name=True,
    )


class Condition(StatusPart):
    type: str = Field(  # not an enumeration: a later operator may know more types
        description="Ready: every block has enough servers and clients are served. Progressing: pods are being "
        "changed to the desired state. Degraded: action or capacity is needed."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Status of the condition.")
    reason: str = Field(
        default="",
        description="Cause, as one CamelCase word; docs/modelswarm-resource.md lists them.",
    )
    message: str = Field(default="", description="Cause, as a sentence that names the action.")
    last_transition_time: str = Field(
        default="",
        description="Time at which `status` of this condition last changed.",
        json_schema_extra={"format": "date-time"},
    )
    observed_generation: int = Field(
        default=0, description="Generation of the swarm that this condition describes."
    )


class ModelStatus(StatusPart):
    """Facts of the model; read once per address, revision and tokenizer."""

    source: str = Field(
        default="", description="Address that was read, with the requested revision."
    )
    tokenizer: str | None = Field(
        default=None, description="Address of the tokenizer, if it is not the model's own."
    )
    revision: str = Field(
        default="",
        description="Resolved revision: the commit on the hub, or a fingerprint of the files.",
    )
    family: str = Field(default="", description="Architecture, such as llama or qwen3.")
    blocks: int = Field(default=0, description="Number of transformer blocks.")
    context: int = Field(default=0, description="Maximum positions of one session.")
    vocab: int = Field(default=0, description="Size of the vocabulary.")
    hidden: int = Field(default=0, description="Width of a row at a block boundary.")
    dtype: str = Field(default="", description="Number format of the stored weights.")
    block_elements: int = Field(default=0, description="Number of weights of the largest block.")
    embedding_elements: int = Field(default=0, description="Number of weights of the embedding.")
    kv_elements: int = Field(
        default=0, description="Number of keys and values of one position in one block."
    )
    smaller_elements: int = Field(
        default=0, description="Number of weights of each block in `smallerBlocks`."
    )
    smaller_blocks: tuple[int, ...] = Field(
        default=(), description="Blocks with fewer weights, such as those without experts."
    )
    tied: bool = Field(
        default=False, description="True if the LM head shares the embedding's weights."
    )
    file_bytes: int = Field(default=0, description="Bytes of all weight files.")
    warnings: tuple[str, ...] = Field(
        default=(), description="Sentences about what will not work, such as chats."
    )


class PlannedMemory(StatusPart):
    """Memory of one server by part, as quantities; what has no limit is planned too.

    It is for people: a part that another version did not know must not invalidate the plan, so none is required.
    """

    process: str = Field(
        default="",
        description="The process before it loads a model: interpreter, torch. On an accelerator its context.",
    )
    weights: str = Field(default="", description="Weights of the span.")
    activations: str = Field(default="", description="Largest step, or loading if that takes more.")
    grammars: str = Field(
        default="", description="Grammars and the tokenizer's tables for them, at the last span."
    )
    retained_rows: str = Field(
        default="", description="Replay log: one row for every position of KV."
    )
    margin: str = Field(
        default="", description="Buffers of links, gaps of the allocator, tables of the kernel."
    )
    kv: str = Field(default="", description="Pages of keys and values.")
    total: str = Field(
        default="", description="Smallest memory limit under which the server starts."
    )
    adapters: str | None = Field(default=None, description="LoRA adapters, if the spec lists any.")
    training: str | None = Field(
        default=None, description="Forward and backward passes, if the spec sets training.memory."
    )


class PlannedSpan(StatusPart):
    index: int = Field(description="Number of the span, from 0.")
    first: int = Field(description="First block.")
    last: int = Field(description="One past the last block.")
    pages: int = Field(
        description="KV pages of each server; an estimate on accelerators without sessions.concurrent."
    )
    memory: PlannedMemory | None = Field(
        default=None, description="Memory that each server needs, by part."
    )
    host: PlannedMemory | None = Field(
        default=None,
        description="Memory of the container, where the server computes on an accelerator.",
    )


class PlanStatus(StatusPart):
    hash: str = Field(
        default="", description="Hash of everything from which a server pod of this plan is built."
    )
    dtype: str = Field(
        default="", description="Number format of weights, KV and rows, of all servers."
    )
    dtype_reason: str = Field(default="", description="Cause of this format, for people.")
    spans: tuple[PlannedSpan, ...] = Field(default=(), description="Spans of the plan, in order.")


class SpanStatus(StatusPart):
    index: int = Field(description="Number of the span, from 0.")
    blocks: str = Field(description="Blocks as FIRST:LAST, LAST excluded.")
    ready: int = Field(default=0, description="Number of ready servers.")
    desired: int = Field(default=0, description="Number of desired servers.")
    servers: tuple[str, ...] = Field(default=(), description="Names of the ready pods.")


class SlotStatus(StatusPart):
    """History of one slot; stored only for slots that have something to remember."""

    slot: str = Field(description="SPAN-ORDINAL, such as 0-1: one server that is kept running.")
    incarnation: int = Field(default=0, description="Number of the latest pod of this slot.")
    failures: int = Field(
        default=0, description="Number of pods that failed since the last stable one."
    )
    rejections: int = Field(
        default=0, description="Number of creates in a row that the API server rejected."
    )
    not_before: str | None = Field(
        default=None,
        description="End of the back-off: the next pod is not created before this time.",
        json_schema_extra={"format": "date-time"},
    )
    last_failure: str | None = Field(
        default=None, description="Cause of the last failure or rejection."
    )


class Status(StatusPart):
    observed_generation: int = Field(
        default=0, description="Generation of the swarm that this status describes."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="Conditions of the swarm, one entry for each type.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    served_name: str = Field(default="", description="The `model` in the requests of clients.")
    adapters: tuple[str, ...] = Field(
        default=(), description="Names of its adapters, which clients may give as `model` too."
    )
    url: str = Field(default="", description="URL of the gateway inside the cluster.")
    replicas: int = Field(
        default=0,
        description="Ready servers of the span that has the fewest, as `scale` reports them.",
    )
    selector: str = Field(
        default="",
        description="Label selector of one span's pods, for autoscalers. One span only, because `replicas` counts per "
        "span.",
    )
    coverage: int = Field(
        default=0,
        description="Ready servers of the block that has the fewest; 0: some block has none.",
    )
    coverage_text: str = Field(
        default="", description="Coverage over desired replicas, such as 2/2, for the column."
    )
    spans: tuple[SpanStatus, ...] = Field(
        default=(), description="Ready and desired servers of each span."
    )
    spans_text: str = Field(
        default="",
        description="Blocks, ready and desired servers of each span in short, such as `0:4=2/2 4:8=1/2`, for the "
        "column.",
    )
    model: ModelStatus | None = Field(default=None, description="Facts of the model.")
    plan: PlanStatus | None = Field(
        default=None, description="Split of the model. Stored before it is acted on."
    )
    incarnation: int = Field(
        default=0,
        description="Highest number ever given to a pod of this swarm. Stored before the pod is created.",
    )
    reconciled_at: str = Field(
        default="",
        description="Value of the annotation modelswarm.io/reconcile-at that was last acted on.",
    )
    slots: tuple[SlotStatus, ...] = Field(
        default=(), description="History of slots, such as failures and back-off."
    )

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """Return a stored status; unknown fields are ignored. ValidationError if known ones do not fit."""
        return cls.model_validate(stored)

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the API server, without unset fields: a large swarm's status stays small."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
