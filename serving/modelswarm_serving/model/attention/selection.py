"""The choice of the attention backend, by device.

Called by `startup.py`. Knows the packages that a backend needs, not the backends.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path

from modelswarm.errors import UserError
from modelswarm_serving.model.attention.attention import SDPA
from modelswarm_serving.model.attention.backend import AttentionBackend
from modelswarm_serving.model.attention.kv_cache import KvCache

log = logging.getLogger(__name__)

BACKENDS = ("auto", "sdpa", "triton")
_LARGEST_HEAD = 256
"""Largest head size of the Triton kernels: their sums are in registers."""


def choose_backend(name: str, cache: KvCache) -> AttentionBackend:
    """Return the backend of this name; auto: Triton on CUDA where it can run, else the reference."""
    if name not in BACKENDS:
        raise UserError("attention", f"{name!r} is not one of {', '.join(BACKENDS)}")
    if name == "sdpa" or (name == "auto" and cache.device.type != "cuda"):
        return SDPA
    fault = _triton_fault(cache)
    if fault is None:
        from modelswarm_serving.model.attention.triton_attention import TritonBackend

        return TritonBackend(cache)
    if name == "triton":
        raise UserError("attention", f"triton cannot run: {fault}; allowed here: sdpa")
    log.warning("attention on %s runs over gathered pages, which is slow: %s", cache.device, fault)
    return SDPA


def _triton_fault(cache: KvCache) -> str | None:
    """Return the reason why the Triton backend cannot run. It compiles a small module in C for its launches."""
    if cache.shape.head_dim > _LARGEST_HEAD:
        return f"heads of {cache.shape.head_dim} are larger than {_LARGEST_HEAD}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "there is no C compiler (gcc or clang)"
    if not Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h").exists():
        return "there are no headers of Python (python3-dev)"
    return None
