"""Clusters that tests of this folder share.

`api`: an API server and nothing behind it; `kwok_api`: with controllers, scheduler and fake nodes' kubelet. Each is
started once per run, when the first test asks for it. `namespace`: one of its own for each test, on whichever of them
the test uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.kube.api_level import ApiLevel, ApiSettings
from cluster.kube.layout import Layout

CLUSTERS = ("kwok_api", "api")  # the fixtures that a namespace can be on


def _running(folder: Path, settings: ApiSettings) -> Iterator[ApiLevel]:
    level = ApiLevel(Layout(folder), settings)
    try:
        yield level.start()
    finally:
        level.down()


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiLevel]:
    """etcd and kube-apiserver; pods stay Pending, nothing is collected. Requests are in `audit_events`."""
    yield from _running(tmp_path_factory.mktemp("api"), ApiSettings(audit=True))


@pytest.fixture(scope="session")
def kwok_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiLevel]:
    """With controller manager, scheduler and kwok: pods on `fake_node`s become Running."""
    settings = ApiSettings(controller_manager=True, scheduler=True, kwok=True, audit=True)
    yield from _running(tmp_path_factory.mktemp("kwok"), settings)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for this test alone; it enforces Pod Security `restricted`."""
    name = next((each for each in CLUSTERS if each in request.fixturenames), "api")
    level: ApiLevel = request.getfixturevalue(name)
    with level.namespace() as made:
        yield made
