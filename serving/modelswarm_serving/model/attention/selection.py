"""The choice of the attention backend, by device.

Called by `startup.py`. Knows the packages that a backend needs, not the backends.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil

from modelswarm.errors import UserError
from modelswarm_serving.model.attention.attention import SDPA
from modelswarm_serving.model.attention.backend import AttentionBackend
from modelswarm_serving.model.attention.kv_cache import KvCache

log = logging.getLogger(__name__)

BACKENDS = ("auto", "sdpa", "triton")


def choose_backend(name: str, cache: KvCache) -> AttentionBackend:
    """Return the backend of this name; auto: Triton on CUDA where it can run, else the reference."""
    if name not in BACKENDS:
        raise UserError("attention", f"{name!r} is not one of {', '.join(BACKENDS)}")
    if name == "sdpa" or (name == "auto" and cache.device.type != "cuda"):
        return SDPA
    missing = _missing_for_triton()
    if missing is None:
        from modelswarm_serving.model.attention.triton_attention import TritonBackend

        return TritonBackend(cache)
    if name == "triton":
        raise UserError("attention", f"triton needs {missing}: install it, or use sdpa")
    log.warning(
        "decode is slow: attention runs over gathered pages, because %s is missing", missing
    )
    return SDPA


def _missing_for_triton() -> str | None:
    """Return what Triton lacks here: it compiles a small C module for its launches."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    if not any(map(shutil.which, ("gcc", "clang"))):
        return "a C compiler (gcc or clang)"
    return None
