"""Python examples of a documentation page, run as they are by a process of their own."""

from __future__ import annotations

import re
import subprocess
import sys


def python_examples(text: str) -> list[str]:
    """Return the fenced Python blocks of a page or a section."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_example(example: str, address: str, actual: str) -> str:
    """Run an example of a swarm at `address` against the one at `actual`. Fail if it does. Return what it prints."""
    assert address in example
    script = example.replace(address, actual)
    made = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
    return made.stdout
