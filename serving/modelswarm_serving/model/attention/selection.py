"""The choice of the attention backend, by device, and the fallback to the reference.

Called by `startup.py`. Knows the packages that a backend needs, not the backends.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path

from modelswarm.errors import DeviceError, UserError
from modelswarm_serving.model.attention import backend_names
from modelswarm_serving.model.attention.attention import SDPA
from modelswarm_serving.model.attention.backend import AttentionBackend
from modelswarm_serving.model.attention.backend_names import AUTO, BACKENDS, TRITON
from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.device import CUDA, Device

log = logging.getLogger(__name__)

_LARGEST_HEAD = 256
"""Largest head size of the Triton kernels: their sums are in registers."""
_LEAST_CAPABILITY = (8, 0)
"""First CUDA capability that Triton supports (Ampere)."""


def choose_backend(name: str, cache: KvCache, device: Device) -> AttentionBackend:
    """Return the backend of this name; auto: Triton on CUDA where it can run, else the reference.

    DeviceError if Triton is named and cannot run.
    """
    if name not in BACKENDS:
        raise UserError("attention_backend", f"{name!r} is not one of {', '.join(BACKENDS)}")
    if name == backend_names.SDPA or (name == AUTO and device.kind != CUDA):
        return SDPA
    fault = _triton_fault(cache, device)
    if fault is not None:
        return fall_back(name, device, fault)
    from modelswarm_serving.model.attention.triton_attention import TritonBackend

    return TritonBackend(cache)


def fall_back(name: str, device: Device, fault: str) -> AttentionBackend:
    """Return the reference and log the fault of Triton; DeviceError if Triton is named."""
    if name == TRITON:
        raise DeviceError(
            f"--attention-backend: triton cannot run on {device}: {fault}; allowed here: auto or sdpa"
        )
    log.warning("attention on %s runs over gathered pages, which is slow: %s", device, fault)
    return SDPA


def _triton_fault(cache: KvCache, device: Device) -> str | None:
    """Return the reason why the Triton backend cannot run. It compiles a small module in C for its launches."""
    if device.kind != CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernels are for CUDA and ROCm"
    capability = device.drivers.capability(device.torch)
    if capability is not None and capability < _LEAST_CAPABILITY:
        return f"the capability is {capability[0]}.{capability[1]}, and Triton needs 8.0"
    if cache.shape.head_dim > _LARGEST_HEAD:
        return f"heads of {cache.shape.head_dim} are larger than {_LARGEST_HEAD}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "there is no C compiler (gcc or clang)"
    if not Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h").exists():
        return "there are no headers of Python (python3-dev)"
    return None
