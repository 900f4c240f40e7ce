"""Choice of the number format in which a swarm runs: once for all servers, with the reason in words.

Rows between servers are in this format, so servers of one route must agree (variant). The plan therefore decides, and
each server gets the result by name. Used by `plan.py`. Knows checkpoints and kinds of hardware, no machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware for which a plan is made; `fast`: formats other than float32 that all of it computes well."""

    name: str
    fast: frozenset[str]


ACCELERATORS = Hardware("an accelerator", frozenset({"bfloat16", "float16"}))
UNKNOWN_CPUS = Hardware("a CPU that the plan does not know", frozenset())
FAST_CPU = Hardware("this CPU", frozenset({"bfloat16"}))
SLOW_CPU = Hardware("this CPU", frozenset())
BFLOAT16_CAPABILITY = 8
"""First major CUDA capability that multiplies bfloat16 in hardware (Ampere); torch emulates it on older devices."""


def gpus_of_capability(capability: int | None) -> Hardware:
    """Return accelerators of which the oldest has this major CUDA capability; None: it is not known."""
    if capability is None or capability >= BFLOAT16_CAPABILITY:
        return ACCELERATORS
    return Hardware(f"a GPU of CUDA capability {capability}", frozenset({"float16"}))


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    name: str
    reason: str  # for people, after the name


def choose_dtype(wanted: str, stored: str, hardware: Hardware) -> DtypeChoice:
    """Return the format of weights, KV and rows. `wanted`: of the document; `stored`: of the checkpoint."""
    if wanted != "auto":
        return DtypeChoice(wanted, "as the document says")
    if stored == "float32" or stored in hardware.fast:
        return DtypeChoice(stored, "as the checkpoint is stored")
    return DtypeChoice("float32", f"{hardware.name} may be slow at the checkpoint's {stored}")
