"""The attention backends, by name.

`selection.py` chooses one. Imports nothing, because flags are read before torch is imported.
"""

from __future__ import annotations

AUTO, SDPA, TRITON = "auto", "sdpa", "triton"

BACKENDS = (AUTO, TRITON, SDPA)
"""Values of `--attention-backend`."""
