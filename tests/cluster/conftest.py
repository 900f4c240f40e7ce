"""Clusters, releases and operators that the tests of this folder share.

`api`: an API server and nothing behind it; `kwok_api`: with controllers, scheduler and fake nodes; `cluster`: two real
nodes with the project's images. Each is started once per run, by the first test that asks for it. `release`: the chart
and the counting swarm, installed on `cluster` once, as the quickstart says. `namespace`: one for each test, on the
cluster that the test uses. `stage`: an operator at work on `api`, shared by a module; every test finds an empty
namespace. `fresh_stage`: the same with an operator of the test's own. With `CLUSTER=existing` and `KUBECONFIG`,
`any_cluster` is that cluster; tests that need more of it than objects and pods ask for `cluster`, and are skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from support.kubernetes.operator_scene import Scene, SharedScene, scene
from support.kubernetes.quickstart import Quickstart, remove_installation
from support.kubernetes.release import Release, open_release
from support.kubernetes.requirements import require

from tools.devcluster.build.packages import api_obstacles, obstacles
from tools.devcluster.build.project_images import project_archives
from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.control_plane.kubeconfig import existing_kubeconfig
from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.down import PARENT, PREFIX
from tools.devcluster.existing import ExistingCluster
from tools.devcluster.layout import Layout
from tools.devcluster.network.namespaces import own_namespace
from tools.devcluster.real import RealCluster, RealSettings

FIRST = pytest.mark.timeout(1500).mark
CLUSTERS = ("cluster", "any_cluster", "kwok_api", "api")  # fixtures of clusters


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test of a real cluster time for its start and for missing images."""
    for item in items:
        wanted = getattr(item, "fixturenames", ())
        if "cluster" in wanted or "any_cluster" in wanted:
            longer = max(mark.args[0] for mark in (*item.iter_markers("timeout"), FIRST))
            item.add_marker(pytest.mark.timeout(longer), append=False)


class HasKubectl(Protocol):
    """The common part of all kinds of clusters."""

    @property
    def kubectl(self) -> Kubectl: ...


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    """Require the programs of all tests here: kubectl, helm, an API server."""
    require(api_obstacles())


def _running(folder: Path, settings: ApiSettings) -> Iterator[ApiLevel]:
    level = ApiLevel(Layout(folder), settings)
    try:
        yield level.start()
    finally:
        level.down()


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiLevel]:
    """Yield etcd and kube-apiserver; pods stay Pending, nothing is collected. `audit_events` has the requests."""
    yield from _running(tmp_path_factory.mktemp("api"), ApiSettings(audit=True))


@pytest.fixture(scope="session")
def kwok_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiLevel]:
    """Yield an API level with controller manager, scheduler and kwok: pods on `fake_node`s become Running."""
    settings = ApiSettings(
        controller_manager=True,
        scheduler=True,
        kwok=True,
        audit=True,
        node_grace_seconds=50,  # kwok renews its nodes every ten seconds; no test waits for their failure
    )
    yield from _running(tmp_path_factory.mktemp("kwok"), settings)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RealCluster]:
    """Yield two real nodes n1 and n2, cluster DNS, the project's images. A test that kills a node revives it."""
    if existing_kubeconfig() is not None:
        require(["CLUSTER=existing: tests must not kill the nodes of a foreign cluster"])
    require(obstacles())
    archives = project_archives()
    layout = Layout(Path(tempfile.mkdtemp(prefix=f"{PREFIX}-", dir=PARENT)))
    running = RealCluster(layout, RealSettings(archives=archives, audit=True))
    try:
        yield running.start()
    finally:
        running.down()


@pytest.fixture(scope="session")
def any_cluster(request: pytest.FixtureRequest) -> RealCluster | ExistingCluster:
    """Return `cluster`, or with CLUSTER=existing the cluster of KUBECONFIG."""
    chosen = existing_kubeconfig()
    if chosen is not None:
        return ExistingCluster(chosen)
    running: RealCluster = request.getfixturevalue("cluster")
    return running


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield this test's own namespace, which enforces Pod Security `restricted`."""
    name = next((each for each in CLUSTERS if each in request.fixturenames), "api")
    running: HasKubectl = request.getfixturevalue(name)
    with own_namespace(running.kubectl) as made:
        yield made


@pytest.fixture(scope="session")
def quickstart(cluster: RealCluster) -> Iterator[Quickstart]:
    """Yield the commands of docs/kubernetes.md, after those that install the chart and the swarm."""
    remove_installation(cluster)
    started = Quickstart(cluster)
    try:
        assert "condition met" in started.run("install")
        yield started
    finally:
        remove_installation(cluster)


@pytest.fixture(scope="session")
def release(quickstart: Quickstart) -> Iterator[Release]:
    """Yield the installed chart with its counting swarm. A test leaves it whole, or waits with `wait_whole`."""
    with open_release(quickstart.cluster) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_scene(api: ApiLevel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedScene]:
    with SharedScene(api, tmp_path_factory.mktemp("shared")) as shared:
        yield shared


@pytest.fixture
def stage(shared_scene: SharedScene) -> Iterator[Scene]:
    """Yield the module's operator, and pods that the test drives as a kubelet. Check its log at the end."""
    with shared_scene.use() as scene:
        yield scene


@pytest.fixture
def fresh_stage(api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    """Yield this test's own operator, which the test may kill, and whose metrics start at zero."""
    with scene(api, namespace, tmp_path, "--resync", "2") as made, made.operator:
        made.operator.wait_ready()
        yield made
        made.operator.check_log()
