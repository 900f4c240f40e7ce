"""Bounds the caches of oneDNN, which keep the code of a product for each number of rows and each shape.

Each entry takes half a MiB for good. By default two caches keep 1024 entries each, so prompts of many lengths would
need more memory than was planned. Called by `__main__.py` before torch is imported, which reads the variables.
"""

from __future__ import annotations

import os

_CAPACITY = 32
"""Entries of each cache. Measured after 2,710 products: 30 MiB with 32 entries, 55 with 64, 728 by default. They are a
part of PROCESS_BYTES. Code that is not kept is made again in 0.5 to 1 ms, once per step and shape."""
_VARIABLES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def limit_product_caches() -> None:
    """Set the capacities, unless the environment sets them."""
    for name in _VARIABLES:
        os.environ.setdefault(name, str(_CAPACITY))
