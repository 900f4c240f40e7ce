"""The test cluster itself: restricted pods run and reach one another across nodes, and nodes fail and recover.

Nothing is left when the cluster is removed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.requirements import require

from tools.devcluster.build.images import BASE_IMAGE
from tools.devcluster.build.packages import obstacles
from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.down import PARENT, PREFIX, leftovers, remove_orphans
from tools.devcluster.existing import ExistingCluster
from tools.devcluster.layout import Layout
from tools.devcluster.nodes.volumes import site_packages
from tools.devcluster.real import RealCluster, RealSettings
from tools.devcluster.record import Record, read_record
from tools.devcluster.waiting import wait_for

pytestmark = pytest.mark.full

POD_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[3]


def pod(name: str, node: str, *command: str, **more: Any) -> dict[str, Any]:
    """Return a restricted pod of the base image on one node."""
    container = {
        "name": "only",
        "image": BASE_IMAGE,
        "command": list(command),
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        **more.pop("container", {}),
    }
    spec = {
        "nodeName": node,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        **more,
    }
    meta = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def web(name: str, node: str) -> dict[str, Any]:
    """Return a pod that serves its own name over HTTP, and is Ready then."""
    probe = {"httpGet": {"path": "/hostname", "port": 8000}, "periodSeconds": 1}
    command = ("python3", "-m", "http.server", "8000", "-d", "/etc")
    return pod(name, node, *command, container={"readinessProbe": probe})


def inside(kubectl: Kubectl, name: str, program: str) -> str:
    return kubectl("exec", name, "--", "python3", "-c", program).strip()


def fetch(address: str) -> str:
    return (
        "import urllib.request as u;"
        f"print(u.urlopen('http://{address}/hostname', timeout=3).read().decode().strip())"
    )


def test_restricted_pod_runs_python(cluster: RealCluster, namespace: str) -> None:
    kubectl = cluster.kubectl.in_namespace(namespace)
    started = time.monotonic()
    kubectl.apply(pod("hello", "n1", "python3", "-c", "import os; print('user', os.getuid())"))
    wait_for("the pod's output", lambda: "user 65532" in _logs(kubectl, "hello"), POD_SECONDS)
    print(f"from apply to its output: {time.monotonic() - started:.1f} s")


def test_pods_of_both_nodes_reach_a_service_by_name(cluster: RealCluster, namespace: str) -> None:
    kubectl = cluster.kubectl.in_namespace(namespace)
    kubectl.apply(web("one", "n1"), web("two", "n2"))
    kubectl("expose", "pod", "one", "--name=web", "--port=80", "--target-port=8000")
    for name in ("one", "two"):
        kubectl.wait_condition("pod", name, "Ready", POD_SECONDS)
    for address in ("web", f"web.{namespace}", f"web.{namespace}.svc.cluster.local"):
        for caller in ("one", "two"):  # its own node, itself, and the other node
            _reaches(kubectl, caller, address, "one")
    service = kubectl.get("service", "web")["spec"]["clusterIP"]
    with urllib.request.urlopen(f"http://{service}/hostname", timeout=5) as answer:
        assert answer.read().strip() == b"one"  # the host reaches Services too


def test_other_node_sees_a_pod_by_its_own_address(cluster: RealCluster, namespace: str) -> None:
    kubectl = cluster.kubectl.in_namespace(namespace)
    kubectl.apply(web("here", "n1"), web("there", "n2"))
    for name in ("here", "there"):
        kubectl.wait_condition("pod", name, "Ready", POD_SECONDS)
    addresses = {name: kubectl.get("pod", name)["status"]["podIP"] for name in ("here", "there")}
    assert inside(kubectl, "there", fetch(f"{addresses['here']}:8000")) == "here"
    wait_for(
        "the caller's address in the log",
        lambda: addresses["there"] in kubectl("logs", "here"),
        POD_SECONDS,
    )


def test_names_outside_the_cluster_do_not_exist(cluster: RealCluster, namespace: str) -> None:
    kubectl = cluster.kubectl.in_namespace(namespace)
    kubectl.apply(web("asks", "n2"))
    kubectl.wait_condition("pod", "asks", "Ready", POD_SECONDS)
    program = (
        "import socket\n"
        "try: print(socket.getaddrinfo('example.org', 80))\n"
        "except OSError as error: print(error)"
    )
    assert "not known" in inside(kubectl, "asks", program)


def test_pod_reads_a_host_folder_through_a_claim(cluster: RealCluster, namespace: str) -> None:
    kubectl = cluster.kubectl.in_namespace(namespace)
    claim = cluster.host_volume("packages", site_packages(), namespace)
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    mount = {"name": "v", "mountPath": "/opt/packages", "readOnly": True}
    environment = [{"name": "PYTHONPATH", "value": "/opt/packages"}]
    program = "import yaml; print('yaml from', yaml.__file__)"
    kubectl.apply(
        pod(
            "reader",
            "n1",
            *("python3", "-c", program),
            container={"volumeMounts": [mount], "env": environment},
            volumes=[volume],
        )
    )
    wait_for(
        "the module from the volume",
        lambda: "yaml from /opt/packages/" in _logs(kubectl, "reader"),
        POD_SECONDS,
        explain=lambda: kubectl("describe", "pod", "reader") + _logs(kubectl, "reader"),
    )


def test_scheduler_counts_the_gpus_of_a_node(cluster: RealCluster, namespace: str) -> None:
    kubectl = cluster.kubectl.in_namespace(namespace)
    wait_for("four GPUs", lambda: _gpus(cluster, "n1") == "4", POD_SECONDS)
    wants = {"resources": {"limits": {"nvidia.com/gpu": "5"}}}
    greedy = pod("greedy", "n1", "sleep", "60", container=wants)
    del greedy["spec"]["nodeName"]
    kubectl.apply(greedy)
    kubectl.wait_condition("pod", "greedy", "PodScheduled", POD_SECONDS, status="False")
    assert "Insufficient nvidia.com/gpu" in kubectl("describe", "pod", "greedy")


def test_killed_container_is_restarted_in_its_pod(cluster: RealCluster, namespace: str) -> None:
    kubectl = cluster.kubectl.in_namespace(namespace)
    kubectl.apply(web("phoenix", "n1"))
    kubectl.wait_condition("pod", "phoenix", "Ready", POD_SECONDS)
    (pid,) = cluster.container_pids("phoenix", namespace)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_for("a restart", lambda: _restarts(kubectl, "phoenix") == 1, POD_SECONDS)
    kubectl.wait_condition("pod", "phoenix", "Ready", POD_SECONDS)
    print(f"from kill -9 to Ready: {time.monotonic() - killed:.1f} s")


@pytest.mark.soak
def test_dead_node_becomes_unready_and_comes_back(cluster: RealCluster, namespace: str) -> None:
    kubectl = cluster.kubectl.in_namespace(namespace)
    kubectl.apply(web("stays", "n1"), web("dies", "n2"))
    for name in ("stays", "dies"):
        kubectl.wait_condition("pod", name, "Ready", POD_SECONDS)
    address = kubectl.get("pod", "dies")["status"]["podIP"]
    died = time.monotonic()
    try:
        assert cluster.kill_node("n2") >= 2  # the pod's container and its pause container
        assert "timed out" in inside(kubectl, "stays", _attempt(f"{address}:8000"))
        cluster.kubectl.wait_condition("node", "n2", "Ready", 60, status="Unknown")
        print(f"from the node's death to NotReady: {time.monotonic() - died:.1f} s")
        wait_for("the pod's eviction", lambda: _terminating(kubectl, "dies"), 60)
        print(f"from the node's death to the pod's eviction: {time.monotonic() - died:.1f} s")
        kubectl.wait_condition("pod", "stays", "Ready", 30)
    finally:
        revived = time.monotonic()
        cluster.revive_node("n2")
        print(f"from boot to Ready: {time.monotonic() - revived:.1f} s")
    kubectl.wait_gone("pod", "dies", 60)
    kubectl.apply(web("after", "n2"))
    kubectl.wait_condition("pod", "after", "Ready", POD_SECONDS)
    assert inside(kubectl, "stays", fetch(f"{_address(kubectl, 'after')}:8000")) == "after"


def test_chosen_cluster_takes_objects(
    any_cluster: RealCluster | ExistingCluster, namespace: str
) -> None:
    """Objects are accepted by the test cluster, or with CLUSTER=existing by that of KUBECONFIG."""
    kubectl = any_cluster.kubectl.in_namespace(namespace)
    kubectl("create", "configmap", "taken")
    assert kubectl.find("configmap", "taken") is not None


@pytest.mark.soak
def test_second_cluster_runs_beside_the_first(cluster: RealCluster, namespace: str) -> None:
    layout = Layout(Path(tempfile.mkdtemp(prefix=f"{PREFIX}-", dir=PARENT)))
    second = RealCluster(layout, RealSettings(nodes=1, gpus=0))
    started = time.monotonic()
    try:
        second.start()
        print(f"from nothing to a Ready node: {time.monotonic() - started:.1f} s")
        assert second.network.octet != cluster.network.octet
        second.kubectl.apply(web("alone", "n1") | {"metadata": {"name": "alone"}})
        second.kubectl.wait_condition("pod", "alone", "Ready", POD_SECONDS)
        assert second.network.octet in _octets()
    finally:
        stopped = time.monotonic()
        second.down()
    print(f"down: {time.monotonic() - stopped:.1f} s")
    assert leftovers(layout, second.network.octet) == []
    assert second.network.octet not in _octets()
    first = cluster.kubectl.in_namespace(namespace)  # it still runs
    first.apply(web("goes-on", "n1"))
    first.wait_condition("pod", "goes-on", "Ready", POD_SECONDS)


@pytest.mark.soak
def test_cluster_of_a_killed_owner_is_removed(cluster: RealCluster) -> None:
    """The processes end with their owner; pods, mounts and groups stay until the next cluster starts."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-", dir=PARENT))
    program = (
        "import sys, time; from pathlib import Path; from tools.devcluster.layout import Layout;"
        "from tools.devcluster.real import RealCluster, RealSettings;"
        "RealCluster(Layout(Path(sys.argv[1])), RealSettings(nodes=1)).start();"
        "print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        (sys.executable, "-c", program, str(folder)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        owner.kill()
    record = _record(Layout(folder))
    assert leftovers(Layout(folder), record.octet) != []
    assert remove_orphans() == [folder]
    assert leftovers(Layout(folder), record.octet) == []
    cluster.kubectl.wait_condition("node", "n2", "Ready", 60)


def test_command_line_starts_and_ends_an_api_level(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    line = _command("up", "--api-only", "--state", state).stdout.strip()
    assert line == f"export KUBECONFIG={state}/kubeconfig"
    assert Kubectl(Path(state) / "kubeconfig").items("namespaces")
    again = _command("up", "--api-only", "--state", state)
    assert again.returncode == 1
    assert "make cluster-down first" in again.stderr
    assert "gone" in _command("down", "--state", state).stderr
    assert leftovers(Layout(Path(state)), -1) == []


def test_command_line_without_root_reports_it(tmp_path: Path) -> None:
    require(obstacles())
    state = str(tmp_path / "state")
    as_user = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
    refused = _command("up", "--state", state, lead=as_user)
    assert refused.returncode == 1
    assert "not root" in refused.stderr
    assert "up --api-only" in refused.stderr
    assert not Path(state).exists()
    up = _command("up", "--api-only", "--state", state, lead=as_user)
    try:
        assert up.stdout.strip() == f"export KUBECONFIG={state}/kubeconfig"
        assert Kubectl(Path(state) / "kubeconfig").items("namespaces")
    finally:
        assert "gone" in _command("down", "--state", state, lead=as_user).stderr


def _command(*words: str, lead: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    ours = {key: value for key, value in os.environ.items() if key != "CLUSTER"}
    return subprocess.run(
        (*lead, sys.executable, "-m", "tools.devcluster", *words),
        cwd=ROOT,
        env={**ours, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _reaches(kubectl: Kubectl, caller: str, address: str, name: str) -> None:
    """Wait for a response: kube-proxy learns of an endpoint shortly after it is Ready."""
    program = _attempt(address)
    wait_for(
        f"{caller} reaching {address}",
        lambda: inside(kubectl, caller, program) == name,
        15,
        explain=lambda: inside(kubectl, caller, program),
    )


def _attempt(address: str) -> str:
    body = fetch(address).replace(";", "\n ")
    return f"try:\n {body}\nexcept OSError as error: print(error)"


def _logs(kubectl: Kubectl, name: str) -> str:
    phase = kubectl.get("pod", name)["status"]["phase"]
    return kubectl("logs", name) if phase != "Pending" else ""


def _restarts(kubectl: Kubectl, name: str) -> int:
    (status,) = kubectl.get("pod", name)["status"]["containerStatuses"]
    return int(status["restartCount"])


def _terminating(kubectl: Kubectl, name: str) -> bool:
    return "deletionTimestamp" in kubectl.get("pod", name)["metadata"]


def _address(kubectl: Kubectl, name: str) -> str:
    return str(kubectl.get("pod", name)["status"]["podIP"])


def _gpus(cluster: RealCluster, node: str) -> str:
    found = cluster.kubectl.get("node", node)
    return str(found["status"]["allocatable"].get("nvidia.com/gpu", ""))


def _record(layout: Layout) -> Record:
    record = read_record(layout)
    assert record is not None
    return record


def _octets() -> set[int]:
    routes = json.loads(subprocess.check_output(("ip", "-json", "route"), text=True))
    return {int(r["dst"].split(".")[1]) for r in routes if r["dst"].startswith("10.")}
