"""Clusters that tests of this folder share.

`api`: an API server and nothing behind it; `kwok_api`: with controllers, scheduler and fake nodes' kubelet; `cluster`:
two real nodes with the project's images. Each is started once per run, when the first test asks for it. `namespace`:
one of its own for each test, on whichever of them the test uses. `stage`: an operator at work on `api`. With
`CLUSTER=existing` and `KUBECONFIG`, `any_cluster` is that cluster; tests that need more of it than objects and pods ask
for `cluster`, and are skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from support.kubernetes.operator_scene import Scene, scene

from tools.devcluster.build.packages import NO_GO, can_build, obstacles
from tools.devcluster.build.project_images import project_archives
from tools.devcluster.chosen import existing_kubeconfig
from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.down import PARENT, PREFIX
from tools.devcluster.existing import ExistingCluster
from tools.devcluster.layout import Layout
from tools.devcluster.network.namespaces import own_namespace
from tools.devcluster.real import RealCluster, RealSettings

FIRST = pytest.mark.timeout(1500).mark
CLUSTERS = ("cluster", "any_cluster", "kwok_api", "api")  # the fixtures that a namespace can be on


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever comes first waits for the cluster, and for images that were not built yet."""
    for item in items:
        wanted = getattr(item, "fixturenames", ())
        if "cluster" in wanted or "any_cluster" in wanted:
            longer = max(mark.args[0] for mark in (*item.iter_markers("timeout"), FIRST))
            item.add_marker(pytest.mark.timeout(longer), append=False)


class HasKubectl(Protocol):
    """What every kind of cluster has."""

    @property
    def kubectl(self) -> Kubectl: ...


def _running(folder: Path, settings: ApiSettings) -> Iterator[ApiLevel]:
    if not can_build():
        pytest.skip(NO_GO)
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
    settings = ApiSettings(
        controller_manager=True,
        scheduler=True,
        kwok=True,
        audit=True,
        node_grace_seconds=50,  # kwok's nodes tell every ten seconds that they live; no test waits for their death
    )
    yield from _running(tmp_path_factory.mktemp("kwok"), settings)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RealCluster]:
    """Two real nodes n1 and n2, cluster DNS, the project's images. Whoever kills a node revives it."""
    if existing_kubeconfig() is not None:
        pytest.skip("CLUSTER=existing: its nodes are not ours to kill")
    problems = obstacles()
    if problems:
        pytest.skip(f"no real nodes here: {'; '.join(problems)}")
    archives = project_archives()
    layout = Layout(Path(tempfile.mkdtemp(prefix=f"{PREFIX}-", dir=PARENT)))
    running = RealCluster(layout, RealSettings(archives=archives, audit=True))
    try:
        yield running.start()
    finally:
        running.down()


@pytest.fixture(scope="session")
def any_cluster(request: pytest.FixtureRequest) -> RealCluster | ExistingCluster:
    """`cluster`, or the one that the person chose."""
    chosen = existing_kubeconfig()
    if chosen is not None:
        return ExistingCluster(chosen)
    running: RealCluster = request.getfixturevalue("cluster")
    return running


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for this test alone; it enforces Pod Security `restricted`."""
    name = next((each for each in CLUSTERS if each in request.fixturenames), "api")
    running: HasKubectl = request.getfixturevalue(name)
    with own_namespace(running.kubectl) as made:
        yield made


@pytest.fixture
def stage(api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    """A running operator, and pods that the test drives as a kubelet would. Its log must hold no surprise."""
    with scene(api, namespace, tmp_path, "--resync", "2") as made, made.operator:
        made.operator.wait_ready()
        yield made
        made.operator.check_log()
