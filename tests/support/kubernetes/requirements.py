"""The decision for a machine that lacks what a test of a cluster or a browser needs: skip the test, or fail it.

Used by fixtures and helpers of these tests. With `REQUIRE_CLUSTER=1`, which CI sets, a skip is a failure:
otherwise a green run could mean that nothing was run. Knows no cluster; the callers name what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest


def require(problems: Sequence[str]) -> None:
    """Return when there are no problems; otherwise end the test with them."""
    if not problems:
        return
    missing = "; ".join(problems)
    if os.environ.get("REQUIRE_CLUSTER") == "1":
        pytest.fail(f"REQUIRE_CLUSTER=1, and this machine can't run the test: {missing}", False)
    pytest.skip(f"this machine can't run the test: {missing}")
