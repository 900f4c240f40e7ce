"""The chart at a real API server: installed, upgraded, rolled back, uninstalled, installed again.

Without controllers, the tests see which objects the API server accepts, keeps and refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kubernetes.api_client import CRD_NAME, USER, ApiClient, delete_crd, wait_crd_served
from support.kubernetes.chart import CHART, VALUES, Object, find_object, pods, render

from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.control_plane.kubectl import CommandFailed, Kubectl
from tools.devcluster.layout import Layout
from tools.devcluster.waiting import wait_for

SWARM = """
apiVersion: modelswarm.io/v1alpha1
kind: ModelSwarm
metadata: {name: counting}
spec: {model: {source: "demo://counting"}, replicas: 2}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiLevel]:
    """Yield this module's own API server, where the chart owns the CRD."""
    level = ApiLevel(Layout(tmp_path_factory.mktemp("chart")), ApiSettings())
    try:
        yield level.start()
    finally:
        level.down()


@pytest.fixture
def kubectl(server: ApiLevel) -> Iterator[Kubectl]:
    with server.namespace("chart") as name:
        yield server.kubectl.in_namespace(name)
        release = server.kubectl.in_namespace(name)
        release.helm("uninstall", "modelswarm", "--ignore-not-found", "--wait=hookOnly")
    delete_crd(server)


def install_and_apply(server: ApiLevel, kubectl: Kubectl) -> None:
    """Install the chart, and apply a swarm."""
    install(kubectl)
    wait_crd_served(server)
    kubectl.apply(SWARM)


def install(kubectl: Kubectl, *flags: str) -> str:
    return kubectl.helm("upgrade", "--install", "modelswarm", str(CHART), "--wait=hookOnly", *flags)


@pytest.mark.full
@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_restricted_namespace_admits_every_object(
    kubectl: Kubectl, server: ApiLevel, values: Path
) -> None:
    for team in ("team-a", "team-b"):
        if server.kubectl.find("namespace", team) is None:
            server.kubectl("create", "namespace", team)
    install(kubectl, "-f", str(values))
    made = pods(render(values, "--namespace", kubectl.namespace))
    assert len(made) == 3  # operator, gateway, test
    for account in {pod["spec"].get("serviceAccountName") for pod in made} - {None}:
        assert kubectl.find("serviceaccount", account) is not None
    for pod in made:
        kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(_placed(pod, kubectl)))


@pytest.mark.full
def test_insecure_context_is_refused(kubectl: Kubectl) -> None:
    flags = ("--set", "gateway.podSecurityContext.runAsNonRoot=false")
    pod = next(
        p
        for p in pods(render(None, "--namespace", kubectl.namespace, *flags))
        if p["metadata"]["name"] == "modelswarm-gateway"
    )
    install(kubectl)
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(_placed(pod, kubectl)))


def test_upgrade_changes_and_rollback_restores(kubectl: Kubectl) -> None:
    install(kubectl)
    assert _replicas(kubectl, "gateway") == 2
    install(kubectl, "--set", "gateway.replicas=5", "--set", "watchNamespaces={default}")
    assert _replicas(kubectl, "gateway") == 5
    assert kubectl.in_namespace("default").find("role", "modelswarm-operator") is not None
    kubectl.helm("rollback", "modelswarm", "1", "--wait=hookOnly")
    assert _replicas(kubectl, "gateway") == 2
    assert kubectl.in_namespace("default").find("role", "modelswarm-operator") is None


def test_swarms_outlive_an_upgrade_and_an_uninstall(server: ApiLevel, kubectl: Kubectl) -> None:
    install_and_apply(server, kubectl)
    install(kubectl, "--set", "gateway.replicas=3")
    kubectl.helm("uninstall", "modelswarm", "--wait=hookOnly")
    assert kubectl.find("deployment", "modelswarm-operator") is None
    kept = kubectl.find("modelswarm", "counting")
    assert kept is not None
    assert kept["spec"]["replicas"] == 2
    install(kubectl)
    assert kubectl.find("deployment", "modelswarm-operator") is not None
    assert kubectl.find("modelswarm", "counting") == kept


@pytest.mark.full
def test_crd_goes_with_the_release_unless_kept(kubectl: Kubectl, server: ApiLevel) -> None:
    install(kubectl, "--set", "crds.keep=false")
    wait_crd_served(server)
    kubectl.helm("uninstall", "modelswarm", "--wait=hookOnly")
    kubectl.wait_gone("crd", CRD_NAME, 30)


@pytest.mark.full
def test_second_release_shares_the_crd(kubectl: Kubectl, server: ApiLevel) -> None:
    install(kubectl)
    with server.namespace("second") as other:
        second = server.kubectl.in_namespace(other)
        with pytest.raises(CommandFailed, match="invalid ownership metadata"):
            install(second)
        install(second, "--set", "crds.enabled=false", "--set", f"watchNamespaces={{{other}}}")
        second.helm("uninstall", "modelswarm", "--wait=hookOnly")
    assert kubectl.find("crd", CRD_NAME) is not None


@pytest.mark.full
def test_crd_applied_by_hand_can_be_taken_over(kubectl: Kubectl) -> None:
    kubectl("create", "-f", str(CHART / "files" / "modelswarm.io_modelswarms.yaml"))
    with pytest.raises(CommandFailed, match="invalid ownership metadata"):
        install(kubectl)
    install(kubectl, "--take-ownership")
    assert kubectl.get("crd", CRD_NAME)["metadata"]["annotations"]["meta.helm.sh/release-name"]


@pytest.mark.full
def test_notes_match_the_installation(kubectl: Kubectl) -> None:
    notes = install(kubectl, "--set", "podMonitor.enabled=true").split("NOTES:")[1]
    service = kubectl.get("service", "modelswarm-gateway")
    port = service["spec"]["ports"][0]["port"]
    forward = (
        f"kubectl port-forward -n {kubectl.namespace} service/modelswarm-gateway 8000:{port} &"
    )
    assert forward in notes
    assert "curl http://127.0.0.1:8000/v1/completions" in notes
    assert f"helm test -n {kubectl.namespace} modelswarm" in notes
    assert "no PodMonitor resource" in notes
    document = notes.split("<<EOF\n")[1].split("EOF")[0]
    kubectl("create", "--dry-run=server", "-f", "-", stdin=document)


@pytest.mark.full
def test_editor_may_scale_the_swarms_of_a_namespace(kubectl: Kubectl, server: ApiLevel) -> None:
    """Without a controller manager to aggregate the rules, the role is bound directly."""
    install_and_apply(server, kubectl)
    role = f"{kubectl.namespace}-modelswarm-edit"
    kubectl("create", "serviceaccount", "editor")
    account = f"{kubectl.namespace}:editor"
    kubectl(
        "create", "rolebinding", "editor", f"--clusterrole={role}", f"--serviceaccount={account}"
    )
    view = role.removesuffix("edit") + "view"
    kubectl(
        "create", "rolebinding", "viewer", f"--clusterrole={view}", f"--serviceaccount={account}"
    )
    wait_allowed(server, kubectl.namespace, "editor")
    file = server.service_account_kubeconfig(kubectl.namespace, "editor")
    editor = Kubectl(file, kubectl.namespace)
    editor("scale", "modelswarm/counting", "--replicas=3")
    assert kubectl.get("modelswarm", "counting")["spec"]["replicas"] == 3
    with pytest.raises(CommandFailed, match="cannot list resource"):
        editor("get", "pods")


@pytest.mark.full
def test_operator_account_has_every_rule_of_its_role(kubectl: Kubectl, server: ApiLevel) -> None:
    install(kubectl)
    wait_allowed(server, kubectl.namespace, "modelswarm-operator")
    file = server.service_account_kubeconfig(kubectl.namespace, "modelswarm-operator")
    operator = Kubectl(file, kubectl.namespace)
    role = find_object(
        render(None, "--namespace", kubectl.namespace),
        "ClusterRole",
        f"{kubectl.namespace}-modelswarm-operator",
    )
    for rule in role["rules"]:
        for resource in rule["resources"]:
            full, _, subresource = resource.partition("/")
            name = f"{full}.{rule['apiGroups'][0]}".rstrip(".")
            flags = [f"--subresource={subresource}"] if subresource else []
            for verb in rule["verbs"]:
                operator("auth", "can-i", verb, name, *flags)
    for refused in ("secrets", "configmaps", "deployments.apps"):
        with pytest.raises(CommandFailed):
            operator("auth", "can-i", "get", refused)


@pytest.mark.full
def test_extra_objects_are_installed_with_the_chart(kubectl: Kubectl) -> None:
    extra = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": '{{ include "modelswarm.fullname" . }}-notes'},
    }
    install(kubectl, "--set-json", f"extraObjects={json.dumps([extra])}")
    assert kubectl.find("configmap", "modelswarm-notes") is not None


def wait_allowed(server: ApiLevel, namespace: str, account: str) -> None:
    """Wait until the API server knows the account's new rules."""
    asked = (USER.format(namespace, account), "get", "modelswarms", namespace, "modelswarm.io")
    with ApiClient(server) as client:
        wait_for(f"{account} to have its rights", lambda: client.is_allowed(*asked), 60)


def _replicas(kubectl: Kubectl, component: str) -> int:
    count: int = kubectl.get("deployment", f"modelswarm-{component}")["spec"]["replicas"]
    return count


def _placed(pod: Object, kubectl: Kubectl) -> Object:
    meta = {**pod["metadata"], "namespace": kubectl.namespace}
    return {**pod, "metadata": meta}
