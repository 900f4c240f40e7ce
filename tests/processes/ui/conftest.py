"""A window with the page of a foreign gateway, which answers what a test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ports import free_port
from support.processes.programs.browser import Browser, chromium
from support.processes.programs.held_gateway import HeldGateway, held_gateway, page_of
from support.processes.programs.shown_page import show


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser"), free_port()) as made:
        yield made


@pytest.fixture
def gateway() -> Iterator[HeldGateway]:
    with held_gateway() as made:
        yield made


@pytest.fixture
def browser(window: Browser, gateway: HeldGateway) -> Iterator[Browser]:
    """Yield a window with the page, which shows two servers and a session."""
    with page_of(gateway) as server:
        window.open(server.url)
        show(window)
        yield window
        window.open("about:blank")
