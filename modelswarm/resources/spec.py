"""The types of the document a user writes: `modelswarm.io/v1alpha1 ModelSwarm`.

One set of types for `modelswarm up` (a file) and for the cluster (the CRD is generated from them, descriptions
included). Files are read through `loading.load_document`, which refuses unknown fields and lists every violation. The
operator reads `Spec` and ignores fields that a later version may have added. Rules beyond types are in `rules`.
Knows no model: the placement checks that blocks exist and fit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from modelswarm.checkpoint.tensor_names import MAX_BLOCKS
from modelswarm.resources import rules as rules
from modelswarm.resources.labels import DOMAIN
from modelswarm.resources.pod_template import POD_TEMPLATE
from modelswarm.resources.rules import MAX_SERVERS, violation
from modelswarm.resources.rules import parse_duration as parse_duration

API_VERSION = f"{DOMAIN}/v1alpha1"
KIND = "ModelSwarm"
MAX_SPANS = 256  # CEL rules over a longer list cost more than the API server allows
MAX_NAME = 40  # characters: pod names of at most 63 add hash, span and incarnation
MAX_POOLS = 32
MAX_ADAPTERS = 64
MAX_LORA_RANK = 16  # vLLM's default

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), rules.NAME]
Source = Annotated[str, Field(max_length=1024), rules.ADDRESS, rules.NO_PARENT_STEPS]
Duration = Annotated[str, Field(max_length=32), rules.DURATION]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000)]
Quantity = Annotated[
    Annotated[StrictInt, Field(le=1 << 53)] | Annotated[str, Field(max_length=32)], rules.QUANTITY
]
Amounts = Annotated[dict[str, Quantity], Field(max_length=16), rules.RESOURCE_NAMES]


class Part(BaseModel):
    """Base of all parts of a document: camelCase in JSON, immutable, no silent conversion."""

    model_config = ConfigDict(
        alias_generator=to_camel, frozen=True, strict=True, validate_by_name=False
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, part: Any) -> Any:
        """Take a null field for an absent one, as the API server does: `pools:` whose items are comments."""
        if not isinstance(part, dict):
            return part
        known = {field.alias for field in cls.model_fields.values()}
        return {key: value for key, value in part.items() if value is not None or key not in known}


Named = TypeVar("Named", "Adapter", "Pool")


def _check_unique_names(parts: tuple[Named, ...]) -> tuple[Named, ...]:
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            kind = type(parts[0]).__name__.lower()
            raise violation(f"{name!r} names more than one {kind}; allowed: names that differ")
    return parts


class SecretKey(Part):
    name: Annotated[str, Field(min_length=1, max_length=253), rules.SECRET] = Field(
        description="Name of a Secret in the namespace of the swarm."
    )
    key: Annotated[str, Field(min_length=1, max_length=253), rules.SECRET_KEY] = Field(
        default="token", description="The key inside the Secret that holds the token."
    )


class Adapter(Part):
    name: Annotated[str, Field(min_length=1, max_length=128), rules.SERVED_NAME] = Field(
        description="The `model` in the requests of clients that want the adapter; unique in the swarm, and not the "
        "model's own name."
    )
    source: Source = Field(
        description="Address of a LoRA adapter in peft's format, like that of a model: a folder with "
        "adapter_config.json and adapter_model.safetensors."
    )


class Model(Part):
    source: Source = Field(
        description="Address of the weights, a Hugging Face model folder: hf://owner/name (a hub), pvc://claim/path "
        "(a volume, mounted read-only), file:///path (in the image, or on a volume of the pod template) or "
        "demo://counting (inside the image)."
    )
    revision: (
        Annotated[str, Field(min_length=1, max_length=256), rules.REVISION, rules.NO_PARENT_STEPS]
        | None
    ) = Field(
        default=None,
        description="Branch, tag or commit of an hf:// source; its default branch if absent. It is resolved once to "
        "a commit, kept in status.model.revision, so that all servers hold the same weights.",
    )
    served_name: Annotated[str, Field(min_length=1, max_length=128), rules.SERVED_NAME] | None = (
        Field(
            default=None,
            description="The `model` in the requests of clients; metadata.name if absent. "
            "Can be changed only while replicas is 0.",
        )
    )
    token_secret_ref: SecretKey | None = Field(
        default=None,
        description="The Secret with the hub token for private and gated models. "
        "The local runtime uses the environment variable HF_TOKEN instead.",
    )
    tokenizer: Source | None = Field(
        default=None,
        description="Address of the tokenizer files and their chat template, instead of the model's own.",
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=65536)] | None = Field(
        default=None,
        description="A Jinja chat template of at most 65536 characters, instead of the model's or the tokenizer's own.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Number format of weights, KV and rows. auto: as the checkpoint is stored, if every pool has an "
        "accelerator that computes it; else float32. The local runtime also keeps bfloat16 on a CPU that multiplies it "
        "in hardware.",
    )
    adapters: Annotated[
        tuple[Adapter, ...],
        Field(strict=False, max_length=MAX_ADAPTERS),
        AfterValidator(_check_unique_names),
    ] = Field(
        default=(),
        description="LoRA adapters of the model, which every server loads. A request names one in place of the model.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )
    max_lora_rank: Annotated[StrictInt, Field(ge=1, le=512)] = Field(
        default=MAX_LORA_RANK,
        description="Largest rank of an adapter. Memory is planned for this rank, in all projections of the blocks.",
    )
    quantization: Literal["none", "int8", "fp8", "int4"] = Field(
        default="none",
        description="Weight-only quantisation. Only `none` is implemented.",
    )

    @property
    def address(self) -> str:
        """Source and revision in one address, as servers take it."""
        return self.source if self.revision is None else f"{self.source}@{self.revision}"

    def names(self, swarm: str) -> tuple[str, ...]:
        """Return what clients may give as `model`: the served name, which is the swarm's by default, and adapters."""
        return (self.served_name or swarm, *(adapter.name for adapter in self.adapters))

    @field_validator("revision")
    @classmethod
    def _check_revision(cls, revision: str | None, others: ValidationInfo) -> str | None:
        source = others.data.get("source")  # absent: it has been refused already
        if source is None or (source.startswith("hf://") and "@" not in source):
            return revision
        raise violation(rules.REVISION_ONLY_FOR_HUB.message)


class BlockRange(Part):
    first: Annotated[StrictInt, Field(ge=0, le=MAX_BLOCKS)] = Field(
        description="First block of the span."
    )
    last: Annotated[StrictInt, Field(ge=1, le=MAX_BLOCKS)] = Field(
        description="One past the last block of the span: blocks [first, last)."
    )


def _check_adjacent(ranges: tuple[BlockRange, ...]) -> tuple[BlockRange, ...]:
    """Refuse ranges that do not start at block 0 or leave a gap or overlap. The placement checks the end."""
    expected = 0
    for index, span in enumerate(ranges):
        where = f"item {index} (first: {span.first}, last: {span.last})"
        if span.last <= span.first:
            raise violation(f"{where} is empty; allowed: last greater than first")
        if span.first > expected:
            raise violation(f"{where} leaves a gap; allowed here: first: {expected}")
        if span.first < expected:
            raise violation(
                f"{where} overlaps the range before it; allowed here: first: {expected}"
            )
        expected = span.last
    return ranges


class Spans(Part):
    count: Annotated[StrictInt, Field(ge=1, le=MAX_SPANS)] | None = Field(
        default=None, description="Split the model into this many spans of about the same size."
    )
    ranges: (
        Annotated[
            tuple[Annotated[BlockRange, rules.RANGE_NOT_EMPTY], ...],
            Field(strict=False, min_length=1, max_length=MAX_SPANS),
            AfterValidator(_check_adjacent),
            rules.RANGES_FROM_ZERO,
            rules.RANGES_NO_OVERLAP,
            rules.RANGES_NO_GAP,
        ]
        | None
    ) = Field(
        default=None,
        description="The spans, in order, from block 0 to the last one, without gap or overlap.",
    )

    @model_validator(mode="after")
    def _check_one_of_two(self) -> Self:
        if self.count is not None and self.ranges is not None:
            raise violation("count and ranges exclude each other; allowed: one of them, or neither")
        return self

    @property
    def given_count(self) -> int:
        """Number of spans that the document asks for; 1 if it leaves the number to the placement."""
        return self.count or len(self.ranges or ()) or 1


def servers_fault(spans: int, replicas: int) -> str | None:
    """Return the sentence about a swarm of more than MAX_SERVERS servers."""
    if spans * replicas <= MAX_SERVERS:
        return None
    return (
        f"{replicas} servers for each of {spans} spans are {spans * replicas}; "
        f"allowed: at most {MAX_SERVERS // spans} per span, {MAX_SERVERS} together"
    )


class Sessions(Part):
    max_length: Count | None = Field(
        default=None,
        description="Maximum positions (prompt and answer together) of one session; the model's context if absent.",
    )
    concurrent: Count | None = Field(
        default=None,
        description="Sessions of maxLength that every server must have KV memory for at the same time. "
        "If absent, KV gets what the memory limit or the accelerator leaves.",
    )
    hold_limit: Duration = Field(
        default="5m",
        description="Maximum time, such as 30s or 5m, that a session is held while no server can take a lost part of "
        "its route.",
    )


class Training(Part):
    memory: Quantity | None = Field(
        default=None,
        description="Memory of forward and backward passes on each server, such as 1Gi, which the plan counts; 0: none "
        "are run. If absent, passes on a CPU get what the memory limit leaves beside the plan, at most 256Mi, and "
        "none are run on an accelerator.",
    )


class ResourceAmounts(Part):
    requests: Amounts = Field(
        default_factory=dict,
        description="Resources that the scheduler reserves for a server: cpu, memory, nvidia.com/gpu and so on, "
        "as in any pod.",
    )
    limits: Amounts = Field(
        default_factory=dict,
        description="Maximum resources of a server, as in any pod; at most one accelerator. Blocks and KV per server "
        "are planned for the smallest `memory` of all pools, or of their accelerators.",
    )


class Accelerator(Part):
    memory: Quantity = Field(
        description="Memory of the device, such as 80Gi; of devices that differ, the smallest. Without `accelerator`, "
        "the label nvidia.com/gpu.memory of the nodes that match the pool's nodeSelector tells it."
    )


class Pool(Part):
    name: Name = Field(description="Name of the pool; unique in the swarm.")
    resources: Annotated[
        ResourceAmounts,
        rules.REQUESTS_WITHIN_LIMITS,
        rules.EXTENDED_RESOURCES_EQUAL,
        rules.ONE_ACCELERATOR,
    ] = Field(
        default=ResourceAmounts(),
        description="Requests and limits of one server: GPUs, CPU, memory. The local runtime sets no limits.",
    )
    accelerator: Accelerator | None = Field(
        default=None,
        description="The device on which the servers of this pool compute. Only for a pool whose servers get one.",
    )
    pod_template: dict[str, JsonValue] | None = Field(
        default=None,
        description="A strategic-merge patch over the server pods of this pool: node selector, tolerations, volumes "
        "and any other field of a pod. The container's name is `server`. Not used by the local runtime.",
        json_schema_extra=POD_TEMPLATE,
    )
    failure_domain_key: Annotated[str, Field(min_length=1, max_length=316), rules.LABEL_KEY] = (
        Field(
            default="kubernetes.io/hostname",
            description="Node label; the servers of a span are spread over its values. Not used by the local runtime.",
        )
    )


class Rollout(Part):
    surge: Annotated[StrictInt, Field(ge=0, le=1000)] = Field(
        default=1,
        description="Servers of a span that may be added before an old one is removed. Not used by the local runtime.",
    )
    drain_timeout: Duration = Field(
        default="5m",
        description="Maximum time, such as 30s or 5m, to migrate the sessions off a server that is removed. "
        "Not used by the local runtime.",
    )


class Spec(Part):
    model: Annotated[Model, rules.REVISION_ONLY_FOR_HUB] = Field(
        description="The model. A change is rolled out server by server; running sessions finish "
        "on the weights with which they started."
    )
    spans: Annotated[Spans, rules.COUNT_OR_RANGES] = Field(
        default=Spans(),
        description="Split of the model: by count, by ranges or, with neither, into as few spans as a server's memory "
        f"allows, at most {MAX_SPANS}.",
    )
    replicas: Annotated[StrictInt, Field(ge=0, le=1000)] = Field(
        default=1,
        description="Servers per span. 0 suspends the swarm: no pod runs, the document stays. "
        f"All spans together: at most {MAX_SERVERS}.",
    )
    sessions: Sessions = Field(
        default=Sessions(), description="The sessions that the servers must have room for."
    )
    training: Training = Field(
        default=Training(),
        description="Forward and backward passes of clients that train, such as soft prompts.",
    )
    pools: Annotated[
        tuple[Annotated[Pool, rules.ACCELERATOR_HAS_DEVICE], ...],
        Field(strict=False, max_length=MAX_POOLS),
        AfterValidator(_check_unique_names),
    ] = Field(
        default=(),
        description="Kinds of machines on which the servers may run. A swarm may have several; without any, "
        "servers run on any node.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    )
    rollout: Rollout = Field(
        default=Rollout(), description="Rollout of changes to running servers."
    )
    paused: bool = Field(
        default=False,
        description="Change nothing: pods stay as they are. The local runtime refuses to start a paused swarm.",
    )

    @field_validator("replicas")
    @classmethod
    def _check_servers(cls, replicas: int, others: ValidationInfo) -> int:
        """Placement checks spans that the document leaves to it."""
        spans = others.data.get("spans")  # absent: they have been refused already
        if spans is not None and (fault := servers_fault(spans.given_count, replicas)):
            raise violation(fault)
        return replicas


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
    """A language model split into spans, each held by several servers, behind a gateway."""

    api_version: Literal["modelswarm.io/v1alpha1"] = Field(description=f"Always {API_VERSION}.")
    kind: Literal["ModelSwarm"] = Field(description=f"Always {KIND}.")
    metadata: Metadata = Field(description="Name and labels of the swarm.")
    spec: Spec = Field(
        description="Desired state: the model, its spans, the servers of each span and their machines."
    )

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.metadata.name

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Return the typed document; unknown fields raise ValidationError. Use `loading`, which explains errors."""
        return cls.model_validate(document, extra="forbid")
