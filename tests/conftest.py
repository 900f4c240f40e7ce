"""The environment of all tests: no gateway of the person who runs them, Ctrl-C as usual, few searches for garbage."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Let children obey SIGINT and SIGHUP, which background jobs and nohup ignore: a program passes that on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # no program inherits a handler
    gc.disable()  # until all is imported and collected


def pytest_collection_finish() -> None:
    """Keep imported modules and collected tests out of the collector: walking them took 5 % of the unit tests' time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def no_gateway_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MODELSWARM_URL", raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield
