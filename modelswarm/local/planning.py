"""From a swarm document to a plan: what `up`, `plan`, `demo`, benchmarks and tests do first.

Knows where facts of a model come from; raises UserError for anything that could not run.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from modelswarm.checkpoint.inspection import inspect_model
from modelswarm.errors import ModelSourceError, UserError
from modelswarm.placement.plan import SwarmPlan, plan_swarm
from modelswarm.placement.quantity import bytes_of
from modelswarm.resources.loading import load_document
from modelswarm.resources.spec import Model, ModelSwarm


def plan_file(path: Path | str, memory: str | None = None) -> SwarmPlan:
    """The plan for a document's file; `memory` per server as the user wrote it."""
    return plan_document(load_document(path), memory)


def plan_document(swarm: ModelSwarm, memory: str | None = None) -> SwarmPlan:
    limit = None if memory is None else bytes_of(memory, "--memory")
    source = source_address(swarm.spec.model)
    # Before anything is started, so that a bad model is refused with nothing half-way.
    _check_tokenizer_and_template(swarm.spec.model)
    facts = inspect_model(source, swarm.spec.model.tokenizer).facts
    return plan_swarm(swarm, facts, source, limit)


def source_address(model: Model) -> str:
    """The address a server understands: source and revision in one."""
    _check_reachable(model.source, "spec.model.source")
    return model.address


def _check_reachable(address: str, field: str) -> None:
    if address.startswith("pvc://"):
        raise UserError(
            field,
            "pvc:// names a volume of a cluster; allowed on one machine: demo://, hf:// or file://",
        )


def _check_tokenizer_and_template(model: Model) -> None:
    """Before anything starts, as far as it can be seen here."""
    if model.tokenizer is not None:
        _check_reachable(model.tokenizer, "spec.model.tokenizer")
    if model.chat_template is not None and find_spec("jinja2"):
        from modelswarm.checkpoint.chat_template import check_template

        try:
            check_template(model.chat_template)
        except ModelSourceError as error:
            raise UserError("spec.model.chatTemplate", error.message) from None


def unused_fields(swarm: ModelSwarm) -> list[str]:
    """Fields that were given and mean something only in a cluster."""
    model = swarm.spec.model
    given = {
        "spec.model.tokenSecretRef": model.token_secret_ref is not None,
        "spec.rollout": "rollout" in swarm.spec.model_fields_set,
        "spec.pools[].podTemplate": any(pool.pod_template for pool in swarm.spec.pools),
    }
    return [field for field, is_given in given.items() if is_given]
