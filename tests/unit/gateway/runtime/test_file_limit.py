"""The open files that a gateway allows itself, and the connections that its ports take of them."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from modelswarm_gateway.runtime import file_limit

RAISE = """
import resource
from modelswarm_gateway.runtime.file_limit import connection_limit, raise_file_limit
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], connection_limit())
"""


def test_a_gateway_opens_as_many_files_as_it_may() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = subprocess.run(
        [sys.executable, "-c", RAISE],
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 1200))),
    )
    assert found.stdout.split() == ["1200", "200"]


def test_a_port_takes_a_share_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1200, 200), (1 << 20, 8192), (-1, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert file_limit.connection_limit() == most
