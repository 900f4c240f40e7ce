"""The API level of other tests: its parts can be killed, paused and doubled."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.kubernetes.api_client import USER, ApiClient

from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.control_plane.kubectl import CommandFailed, Kubectl
from tools.devcluster.control_plane.kwok import fake_node
from tools.devcluster.layout import Layout
from tools.devcluster.processes import start_ticks
from tools.devcluster.waiting import wait_for

POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  nodeName: {node}
  securityContext: {{runAsNonRoot: true, runAsUser: 65532, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: only
    image: localhost/nothing:1
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"""


@pytest.fixture(scope="module")
def own_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiLevel]:
    """Yield this module's own API level, which tests kill and pause."""
    level = ApiLevel(Layout(tmp_path_factory.mktemp("own")), ApiSettings(audit=True))
    try:
        yield level.start()
    finally:
        level.down()


def test_service_account_has_only_granted_rights(api: ApiLevel, namespace: str) -> None:
    account = Kubectl(api.service_account_kubeconfig(namespace, "default"), namespace)
    assert "cannot list resource" in _refusal(account, "get", "pods")
    admin = api.kubectl.in_namespace(namespace)
    admin("create", "role", "reader", "--verb=list", "--resource=pods")
    admin(
        "create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace}:default"
    )
    with ApiClient(api) as client:
        user = USER.format(namespace, "default")
        wait_for(
            "the right to be known", lambda: client.is_allowed(user, "list", "pods", namespace), 180
        )
    assert account.items("pods") == []


def test_namespace_refuses_unrestricted_pods(api: ApiLevel, namespace: str) -> None:
    kubectl = api.kubectl.in_namespace(namespace)
    careless = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "careless"},
        "spec": {"containers": [{"name": "only", "image": "localhost/nothing:1"}]},
    }
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        kubectl.apply(careless)


@pytest.mark.full
def test_objects_outlive_kills_of_api_server_and_etcd(own_api: ApiLevel) -> None:
    with own_api.namespace() as namespace:
        own_api.kubectl.in_namespace(namespace)("create", "configmap", "kept")
        own_api.restart_apiserver()
        own_api.stop_etcd()
        own_api.start_etcd()
        assert own_api.kubectl.in_namespace(namespace).find("configmap", "kept") is not None


@pytest.mark.full
def test_resumed_api_server_answers_again(own_api: ApiLevel) -> None:
    own_api.pause_apiserver()
    try:
        refusal = _refusal(own_api.kubectl, "get", "ns", "--request-timeout=1s")
        assert re.search("[Tt]imeout|deadline exceeded", refusal)  # depends on Go's timers
    finally:
        own_api.resume_apiserver()
    assert own_api.kubectl.items("namespaces")


@pytest.mark.full
def test_two_api_servers_share_one_store(own_api: ApiLevel) -> None:
    other = Kubectl(
        own_api.user_kubeconfig("admin", "system:masters", own_api.add_apiserver("second"))
    )
    with own_api.namespace() as namespace:
        assert other.find("namespace", namespace) is not None
        own_api.stop_apiserver("second", kill=False)
        assert own_api.kubectl.find("namespace", namespace) is not None


@pytest.mark.full
def test_audit_log_has_every_request(own_api: ApiLevel) -> None:
    with own_api.namespace() as namespace:
        own_api.kubectl.in_namespace(namespace)("create", "configmap", "watched")
    creates = [
        event
        for event in own_api.audit_events()
        if event["verb"] == "create" and "watched" in str(event["objectRef"])
    ]
    assert len(creates) == 1


@pytest.mark.full
def test_fake_node_runs_pods_and_counts_gpus(kwok_api: ApiLevel, namespace: str) -> None:
    kubectl = kwok_api.kubectl.in_namespace(namespace)
    kwok_api.kubectl.apply(fake_node("fake-gpus", gpus=4))
    try:
        kwok_api.kubectl.wait_condition("node", "fake-gpus", "Ready", 30)
        kubectl.apply(POD.format(name="placed", node="fake-gpus"))
        kubectl.wait_condition("pod", "placed", "Ready", 30)
        node = kwok_api.kubectl.find("node", "fake-gpus")
        assert node is not None
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "4"
    finally:
        kwok_api.kubectl(
            "delete", "node", "fake-gpus"
        )  # pods of other tests would be scheduled there


@pytest.mark.full
def test_no_process_runs_after_down(tmp_path_factory: pytest.TempPathFactory) -> None:
    level = ApiLevel(Layout(tmp_path_factory.mktemp("brief")), ApiSettings()).start()
    pids = [level.processes.pid(name) for name in level.processes.names()]
    level.down()
    assert len(pids) == 2
    assert [start_ticks(pid) for pid in pids if pid is not None] == [None, None]


def _refusal(kubectl: Kubectl, *words: str) -> str:
    with pytest.raises(CommandFailed) as caught:
        kubectl(*words)
    return caught.value.stderr
