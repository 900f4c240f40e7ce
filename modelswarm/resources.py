"""What a person writes: the `modelswarm.io/v1alpha1 ModelSwarm` document.

One set of types for `modelswarm up` (a file) and for the cluster (the CRD is generated from them, descriptions
included). Read through `resources_load.load_document`, which refuses unknown fields and lists every violation.
Knows no model: whether blocks exist or fit is the placement's question.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictInt,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

API_VERSION = "modelswarm.io/v1alpha1"
KIND = "ModelSwarm"
MAX_SPANS = 256  # the CRD's overlap rule costs more than the API server allows beyond this
MAX_NAME = (
    40  # leaves room for `-s<span>-r<ordinal>` and a hash in pod names of at most 63 characters
)

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


def seconds_of(duration: str) -> float:
    """`"1m30s"` is 90.0; the text must have passed the Duration pattern."""
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(duration))


Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=MAX_NAME)]
Source = Annotated[str, Field(pattern=r"^(demo|hf|pvc|file)://[^\s]+$", max_length=1024)]
Duration = Annotated[str, Field(pattern=r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$", max_length=32)]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000)]
Quantity = StrictInt | Annotated[str, Field(pattern=r"^[0-9.]+(m|[kKMGTP]i?)?$", max_length=32)]


class Part(BaseModel):
    """Every part of a document: camelCase outside, immutable, nothing converted silently."""

    model_config = ConfigDict(
        alias_generator=to_camel, frozen=True, strict=True, validate_by_name=False
    )


class SecretKey(Part):
    name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Name of a Secret in the namespace of the swarm."
    )
    key: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default="token", description="The key inside the Secret that holds the token."
    )


class Model(Part):
    source: Source = Field(
        description="Where the weights are: demo://counting (inside the package), hf://owner/name, "
        "pvc://claim/path (cluster only) or file:///path/of/a/folder. A Hugging Face model folder in each case."
    )
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None,
        description="Branch, tag or commit of an hf:// source; its default branch if absent.",
    )
    served_name: (
        Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", max_length=128)] | None
    ) = Field(
        default=None, description="The name clients ask for in `model`; metadata.name if absent."
    )
    token_secret_ref: SecretKey | None = Field(
        default=None,
        description="The Secret with the hub token for private models. "
        "The local runtime uses the environment variable HF_TOKEN instead.",
    )
    tokenizer: Source | None = Field(
        default=None,
        description="Take the tokenizer from this source instead of the model's own. "
        "Not used by the local runtime yet.",
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=65536)] | None = Field(
        default=None,
        description="A Jinja chat template instead of the model's own. Not used by the local runtime yet.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="What weights and KV are held in; auto lets the server choose."
    )
    quantization: Literal["none", "int8", "fp8", "int4"] = Field(
        default="none",
        description="Weight-only quantisation. Not used by the local runtime yet.",
    )


class BlockRange(Part):
    first: Annotated[StrictInt, Field(ge=0)] = Field(description="First block of the span.")
    last: Annotated[StrictInt, Field(ge=1)] = Field(
        description="One past the last block of the span: blocks [first, last)."
    )


def _adjacent(ranges: tuple[BlockRange, ...]) -> tuple[BlockRange, ...]:
    """Spans start at block 0 and follow each other; the end is checked when the model is known."""
    expected = 0
    for index, span in enumerate(ranges):
        where = f"item {index} (first: {span.first}, last: {span.last})"
        if span.last <= span.first:
            raise _wrong(f"{where} is empty; allowed: last greater than first")
        if span.first > expected:
            raise _wrong(f"{where} leaves a gap; allowed here: first: {expected}")
        if span.first < expected:
            raise _wrong(f"{where} overlaps what comes before; allowed here: first: {expected}")
        expected = span.last
    return ranges


def _wrong(sentence: str) -> PydanticCustomError:
    return PydanticCustomError("modelswarm", "{sentence}", {"sentence": sentence})


class Spans(Part):
    count: Annotated[StrictInt, Field(ge=1, le=MAX_SPANS)] | None = Field(
        default=None, description="Split the model into this many spans of about the same size."
    )
    ranges: (
        Annotated[
            tuple[BlockRange, ...],
            Field(strict=False, min_length=1, max_length=MAX_SPANS),
            AfterValidator(_adjacent),
        ]
        | None
    ) = Field(
        default=None,
        description="The spans themselves, in order, from block 0 to the last one, without gap or overlap.",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.count is not None and self.ranges is not None:
            raise _wrong("count and ranges exclude each other; allowed: one of them, or neither")
        return self


class Sessions(Part):
    max_length: Count | None = Field(
        default=None,
        description="Most positions (prompt and answer together) of one session; the model's context if absent.",
    )
    concurrent: Count | None = Field(
        default=None,
        description="Sessions of maxLength that every server must have KV memory for at the same time. "
        "If absent, KV gets the memory that is there.",
    )
    hold_limit: Duration = Field(
        default="5m",
        description="How long a session may be held while no server can take a lost part of its route, as 30s or 5m.",
    )


class ResourceAmounts(Part):
    requests: dict[str, Quantity] = Field(
        default_factory=dict, description="What the scheduler sets aside, as in any pod."
    )
    limits: dict[str, Quantity] = Field(
        default_factory=dict,
        description="What a server may use at most, as in any pod; `plan` reads `memory`.",
    )


class Pool(Part):
    name: Name = Field(description="Name of the pool; unique in the swarm.")
    resources: ResourceAmounts = Field(
        default=ResourceAmounts(),
        description="Requests and limits of one server: GPUs, CPU, memory. The local runtime sets no limits.",
    )
    pod_template: dict[str, JsonValue] | None = Field(
        default=None,
        description="A strategic-merge patch over the server pods: node selector, tolerations, volumes, anything. "
        "Not used by the local runtime.",
    )
    failure_domain_key: Annotated[str, Field(min_length=1, max_length=316)] = Field(
        default="kubernetes.io/hostname",
        description="Node label over whose values the servers of a span are spread. Not used by the local runtime.",
    )


def _unique_names(pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
    names = [pool.name for pool in pools]
    for name in names:
        if names.count(name) > 1:
            raise _wrong(f"{name!r} names more than one pool; allowed: names that differ")
    return pools


class Rollout(Part):
    surge: Annotated[StrictInt, Field(ge=0, le=1000)] = Field(
        default=1,
        description="Servers of a span that may be added before an old one goes. Not used by the local runtime.",
    )
    drain_limit: Duration = Field(
        default="5m",
        description="How long a server that is to go may take to hand over its sessions, as 30s or 5m. "
        "Not used by the local runtime.",
    )


class Spec(Part):
    model: Model = Field(description="The model that is served.")
    spans: Spans = Field(
        default=Spans(),
        description="How the model is split: by count, by ranges, or, with neither, "
        "into as few spans as the memory of a server allows.",
    )
    replicas: Annotated[StrictInt, Field(ge=0, le=1000)] = Field(
        default=1,
        description="Servers per span. 0 suspends the swarm: nothing runs, the document stays.",
    )
    sessions: Sessions = Field(
        default=Sessions(), description="What the servers must have room for."
    )
    pools: Annotated[
        tuple[Pool, ...],
        Field(strict=False, max_length=32),
        AfterValidator(_unique_names),
    ] = Field(
        default=(),
        description="Kinds of machines the servers may run on; several in one swarm are fine.",
    )
    rollout: Rollout = Field(default=Rollout(), description="How changes reach running servers.")
    paused: bool = Field(
        default=False,
        description="Leave what runs as it is and change nothing. The local runtime refuses to start a paused swarm.",
    )


class Metadata(Part):
    name: Name = Field(description="Name of the swarm.")
    namespace: Annotated[str, Field(max_length=63)] | None = Field(
        default=None, description="Namespace in the cluster. Not used by the local runtime."
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="As in any resource. Not used by the local runtime."
    )
    annotations: dict[str, str] = Field(
        default_factory=dict, description="As in any resource. Not used by the local runtime."
    )


class ModelSwarm(Part):
    """A language model split into spans, each held by several servers, that answers through a gateway."""

    api_version: Literal["modelswarm.io/v1alpha1"] = Field(description=f"Always {API_VERSION}.")
    kind: Literal["ModelSwarm"] = Field(description=f"Always {KIND}.")
    metadata: Metadata = Field(description="Name and labels of the swarm.")
    spec: Spec = Field(description="What is wanted.")

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.metadata.name

    @classmethod
    def parse(cls, document: Any) -> Self:
        """The typed document; unknown fields raise. Callers want `resources_load`, which explains."""
        return cls.model_validate(document, extra="forbid")
