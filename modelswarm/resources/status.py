"""What the operator says of a swarm: the `status` of a ModelSwarm, as the CRD declares it.

The operator builds and reads it; the CRD is generated from it together with `resources`. Reading is tolerant: another
version of the operator may have written more, or less. Times are text as Kubernetes writes them, in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


def format_timestamp(seconds: float) -> str:
    """Seconds since the epoch as `2026-11-21T12:00:00Z`; fractions are dropped."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> float:
    """The reverse of `timestamp`; also reads fractions and offsets."""
    return datetime.fromisoformat(text).timestamp()


class StatusPart(BaseModel):
    """Every part of a status: camelCase outside, immutable; what this version does not know is left out."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="ignore",
        frozen=True,
        validate_by_alias=True,
        validate_by_name=True,
    )


class Condition(StatusPart):
    type: str = Field(  # not an enumeration: a later operator may know more types
        description="Ready: every block has enough servers and clients are answered. Progressing: what runs is "
        "being brought to what is wanted. Degraded: something needs a person, or capacity."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    reason: str = Field(
        default="",
        description="Why, in one CamelCase word; docs/modelswarm-resource.md lists them.",
    )
    message: str = Field(default="", description="Why, in a sentence a person can act on.")
    last_transition_time: str = Field(
        default="",
        description="When `status` of this condition last changed.",
        json_schema_extra={"format": "date-time"},
    )
    observed_generation: int = Field(
        default=0, description="The generation of the swarm that this condition speaks of."
    )


class ModelStatus(StatusPart):
    """What is known of the model; read once per address, revision and tokenizer."""

    source: str = Field(
        default="", description="The address that was read, with the revision that was asked for."
    )
    tokenizer: str | None = Field(
        default=None, description="The address the tokenizer was read from, if it is another."
    )
    revision: str = Field(
        default="",
        description="What the address stands for: the commit of a hub, or a fingerprint.",
    )
    family: str = Field(default="", description="Architecture, such as llama or qwen3.")
    blocks: int = Field(default=0, description="Number of transformer blocks.")
    context: int = Field(default=0, description="Most positions of one session.")
    vocab: int = Field(default=0, description="Size of the vocabulary.")
    hidden: int = Field(default=0, description="Width of a row at a block boundary.")
    dtype: str = Field(default="", description="Number format the weights are stored in.")
    block_elements: int = Field(default=0, description="Weights of the largest block, in numbers.")
    embedding_elements: int = Field(default=0, description="Weights of the embedding, in numbers.")
    kv_elements: int = Field(
        default=0, description="Keys and values of one position in one block, in numbers."
    )
    tied: bool = Field(
        default=False, description="Whether the head shares the embedding's weights."
    )


class PlannedSpan(StatusPart):
    index: int = Field(description="Number of the span, from 0.")
    first: int = Field(description="First block.")
    last: int = Field(description="One past the last block.")
    pages: int = Field(description="KV pages of each server.")


class PlanStatus(StatusPart):
    hash: str = Field(
        default="", description="Short name of everything a server pod of this plan is made from."
    )
    spans: tuple[PlannedSpan, ...] = Field(
        default=(), description="The spans that servers are started for, in order."
    )


class SpanStatus(StatusPart):
    index: int = Field(description="Number of the span, from 0.")
    blocks: str = Field(description="Its blocks as FIRST:LAST, LAST excluded.")
    ready: int = Field(default=0, description="Servers that serve it now.")
    desired: int = Field(default=0, description="Servers it should have.")
    servers: tuple[str, ...] = Field(default=(), description="Pods that serve it now, by name.")


class SlotStatus(StatusPart):
    """Kept only for slots that have something to remember."""

    slot: str = Field(description="SPAN-ORDINAL, such as 0-1: one server that is kept running.")
    incarnation: int = Field(default=0, description="Number of the latest pod of this slot.")
    failures: int = Field(default=0, description="Pods that failed since one was last stable.")
    not_before: str | None = Field(
        default=None,
        description="The next pod is not created before this time.",
        json_schema_extra={"format": "date-time"},
    )
    last_failure: str | None = Field(default=None, description="How the last pod failed.")


class Status(StatusPart):
    observed_generation: int = Field(
        default=0, description="The generation of the swarm that this status speaks of."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="The state in words, one entry for each type.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
    served_name: str = Field(default="", description="What clients give as `model`.")
    url: str = Field(default="", description="Where clients reach the gateway inside the cluster.")
    replicas: int = Field(
        default=0,
        description="Ready servers of the span that has the fewest; what `scale` reports.",
    )
    selector: str = Field(
        default="",
        description="Label selector of one span's pods, for autoscalers. One span only, as `replicas` counts per span.",
    )
    coverage: int = Field(
        default=0,
        description="Ready servers of the block that has the fewest; 0: some block has none.",
    )
    coverage_text: str = Field(
        default="", description="Coverage over wanted replicas, such as 2/2, for the column."
    )
    spans: tuple[SpanStatus, ...] = Field(default=(), description="Which pods serve which blocks.")
    spans_text: str = Field(
        default="", description="The same in short, such as `0:4=2/2 4:8=1/2`, for the column."
    )
    model: ModelStatus | None = Field(default=None, description="What is known of the model.")
    plan: PlanStatus | None = Field(
        default=None, description="How the model is split. Stored before it is acted on."
    )
    incarnation: int = Field(
        default=0,
        description="Highest number ever given to a pod of this swarm. Stored before the pod is created.",
    )
    reconciled_at: str = Field(
        default="",
        description="The annotation modelswarm.io/reconcile-at as it was last obeyed.",
    )
    slots: tuple[SlotStatus, ...] = Field(
        default=(), description="What the operator remembers of servers that failed."
    )

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """What is stored, as far as it is understood. ValidationError: not even that."""
        return cls.model_validate(stored)

    def to_json(self) -> dict[str, Any]:
        """For the API server: nothing that was never set, so that a large swarm's status stays small."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
