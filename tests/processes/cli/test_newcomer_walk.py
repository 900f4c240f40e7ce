"""The whole README in a bare Debian, as a newcomer runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.ci.newcomer.container import obstacles

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(obstacles()), reason="; ".join(obstacles()))
def test_newcomer_walks_through_the_readme() -> None:
    command = (sys.executable, "-m", "tools.ci.newcomer_walk")
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
