"""Makes the plan of a swarm from its document, for this machine.

Inspects the model and raises UserError for anything that could not run. Used by `up`, `plan`, `demo`, benchmarks and
tests. Starts nothing.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

from modelswarm.checkpoint.hub import pin_source
from modelswarm.checkpoint.inspection import inspect_model
from modelswarm.errors import ModelSourceError, UserError
from modelswarm.placement.dtype import ACCELERATORS, FAST_CPU, SLOW_CPU, Hardware
from modelswarm.placement.plan import SwarmPlan, plan_swarm
from modelswarm.placement.quantity import bytes_of
from modelswarm.process.control_groups import ROOT
from modelswarm.process.cpu_features import cpu_kernels, has_fast_bfloat16
from modelswarm.resources.spec import Model, ModelSwarm


def plan_document(swarm: ModelSwarm, memory: str | None = None, device: str = "cpu") -> SwarmPlan:
    """Return the plan for a document.

    `memory`: of one server, as the user wrote it. `device`: of all servers, as their flag takes it.
    """
    limit = None if memory is None else bytes_of(memory, "--memory")
    hardware = machine_hardware(device)
    if limit is not None and hardware is ACCELERATORS:
        detail = f"sizes servers on the CPU, but --device is {device}; allowed: spec.spans and spec.sessions.concurrent"
        raise UserError("--memory", detail)
    source = source_address(swarm.spec.model)

    _check_tokenizer_and_template(swarm.spec.model)
    for adapter in swarm.spec.model.adapters:
        _check_reachable(adapter.source, f"spec.model.adapters[{adapter.name}].source")
    found = inspect_model(source, swarm.spec.model.tokenizer)
    source = pin_source(source, found.revision)  # for servers that are started again
    plan = plan_swarm(swarm, found.facts, source, limit, hardware=hardware)
    if swarm.spec.model.chat_template is not None:  # it replaces the model's own
        return plan
    return dataclasses.replace(plan, warnings=found.warnings)


def machine_hardware(device: str, root: Path = ROOT) -> Hardware:
    """Return the hardware of this machine, on which all servers run.

    With `auto` the CPU decides: only torch knows whether there is an accelerator, and planning imports no torch.
    """
    if device not in ("auto", "cpu"):
        return ACCELERATORS
    cpu, kernels = FAST_CPU if has_fast_bfloat16(root) else SLOW_CPU, cpu_kernels(root)
    return dataclasses.replace(cpu, name=f"{cpu.name} ({kernels})") if kernels else cpu


def source_address(model: Model) -> str:
    """Return the model's address as servers take it, source and revision in one."""
    _check_reachable(model.source, "spec.model.source")
    return model.address


def _check_reachable(address: str, field: str) -> None:
    if address.startswith("pvc://"):
        raise UserError(
            field,
            "pvc:// names a volume of a cluster; allowed on one machine: demo://, hf:// or file://",
        )


def _check_tokenizer_and_template(model: Model) -> None:
    """Refuse an unusable tokenizer address or chat template. Templates are checked if jinja2 is installed."""
    if model.tokenizer is not None:
        _check_reachable(model.tokenizer, "spec.model.tokenizer")
    if model.chat_template is not None and find_spec("jinja2"):
        from modelswarm.checkpoint.chat_template import check_template

        try:
            check_template(model.chat_template)
        except ModelSourceError as error:
            raise UserError("spec.model.chatTemplate", error.message) from None


def unused_fields(swarm: ModelSwarm) -> list[str]:
    """Return the fields in the document that have a meaning only in a cluster."""
    model = swarm.spec.model
    given = {
        "spec.model.tokenSecretRef": model.token_secret_ref is not None,
        "spec.rollout": "rollout" in swarm.spec.model_fields_set,
        "spec.pools[].podTemplate": any(pool.pod_template for pool in swarm.spec.pools),
        "spec.pools[].failureDomainKey": any(
            "failure_domain_key" in pool.model_fields_set for pool in swarm.spec.pools
        ),
    }
    return [field for field, is_given in given.items() if is_given]
