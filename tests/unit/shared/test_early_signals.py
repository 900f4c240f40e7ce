"""Every program can be asked to stop from its first moment on, as the first process of a container too."""

from __future__ import annotations

import subprocess
import sys

import pytest

ASKED_EARLY = """
import os, signal, sys
from modelswarm_{part}.__main__ import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("modelswarm_{part}."):  # nothing that takes time is imported yet
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["--no-such-flag"]
sys.exit(main())
"""


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("part", ["serving", "gateway", "operator"])
def test_signal_during_import_ends_the_process_with_0(part: str, signal: str) -> None:
    code = ASKED_EARLY.format(part=part, signal=signal)
    done = subprocess.run(
        (sys.executable, "-c", code), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
