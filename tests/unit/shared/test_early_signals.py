"""Every program ends on a signal from its start on, also as the first process of a container."""

from __future__ import annotations

import subprocess
import sys

import pytest

SIGNAL_DURING_IMPORT = """
import os, signal, sys
from modelswarm_{program}.__main__ import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("modelswarm_{program}."):  # before any slow import
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["--no-such-flag"]
sys.exit(main())
"""


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("program", ["serving", "gateway", "operator"])
def test_signal_during_import_ends_the_process_with_0(program: str, signal: str) -> None:
    code = SIGNAL_DURING_IMPORT.format(program=program, signal=signal)
    done = subprocess.run(
        (sys.executable, "-c", code), capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
