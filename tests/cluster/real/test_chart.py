"""The chart as rendered by helm: the objects of every values file, refused values, and the flags of the processes."""

from __future__ import annotations

import json
import re
import shlex
from itertools import product
from pathlib import Path

import pytest
import yaml
from support.kubernetes.alerts import RULES, fill
from support.kubernetes.chart import (
    CHART,
    NAMESPACE,
    NO_CLUSTER,
    ROOT,
    VALUES,
    Object,
    arguments,
    find_object,
    of_kind,
    pods,
    refusal,
    render,
)

from modelswarm_gateway.settings import parse_settings as parse_gateway
from modelswarm_operator.kube import access_review
from modelswarm_operator.reconcile.manifests.manifests import METRICS_PORT
from modelswarm_operator.settings import parse_settings as parse_operator
from tools import make_images
from tools.make_chart_docs import read_values, replace_table

EVERY_VALUES = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
MONITORING = (
    *("--api-versions", "monitoring.coreos.com/v1/PodMonitor"),
    *("--api-versions", "monitoring.coreos.com/v1/PrometheusRule"),
)
EVERYTHING = CHART / "ci" / "everything.yaml"
NAMESPACED = CHART / "ci" / "namespaced.yaml"


@EVERY_VALUES
def test_helm_lint_finds_no_fault(values: Path) -> None:
    NO_CLUSTER.helm("lint", "--strict", str(CHART), "-f", str(values))


@pytest.mark.full
@EVERY_VALUES
def test_every_object_has_the_standard_labels(values: Path) -> None:
    for found in render(values, *MONITORING):
        labels = found["metadata"].get("labels", {})
        if "notes" in found["metadata"]["name"] or found["metadata"]["name"] == "more":
            continue  # extraObjects are unchanged
        assert labels["app.kubernetes.io/part-of"] == "modelswarm"
        assert labels["app.kubernetes.io/instance"] == "modelswarm"
        assert labels["helm.sh/chart"].startswith("modelswarm-")
        assert {"name", "component", "version", "managed-by"} <= {
            key.removeprefix("app.kubernetes.io/") for key in labels
        }


@pytest.mark.full
@EVERY_VALUES
def test_services_and_budgets_select_their_pods(values: Path) -> None:
    objects = render(values)
    made = pods(objects)
    for found in of_kind(objects, "Service", "PodDisruptionBudget"):
        selector = found["spec"]["selector"].get("matchLabels", found["spec"]["selector"])
        matching = [p for p in made if selector.items() <= p["metadata"]["labels"].items()]
        name = found["metadata"]["name"].removesuffix("-admin")
        assert [p["metadata"]["name"] for p in matching] == [name]


@pytest.mark.full
@EVERY_VALUES
def test_every_pod_is_restricted(values: Path) -> None:
    for pod in pods(render(values)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_operator_accepts_its_flags(tmp_path: Path) -> None:
    objects = render(EVERYTHING, "--set", "fullnameOverride=modelswarm")
    template = find_object(objects, "ConfigMap", "modelswarm-server-pod-template")["data"]
    file = tmp_path / "server-pod-template.yaml"
    file.write_text(template["server-pod-template.yaml"])
    flags = [
        word.replace("/etc/modelswarm", str(tmp_path)) for word in arguments(objects, "operator")
    ]
    settings = parse_operator(flags)
    assert settings.policy.server_image == "registry.example.com:5000/ai/modelswarm/server:1.2.3"
    assert settings.policy.image_pull_policy == "Always"
    assert settings.policy.gateway_url == "https://ai.example.com"
    assert settings.policy.pod_template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert settings.policy.pod_template["spec"]["runtimeClassName"] == "nvidia"
    assert settings.namespaces == ("team-a",)
    assert (settings.lease_namespace, settings.lease_name) == (NAMESPACE, "modelswarm-operator")
    assert settings.metrics == ("0.0.0.0", 8080)
    assert settings.resync_seconds == 30.0
    assert settings.json_logs


def test_gateway_accepts_its_flags_and_has_time_to_stop() -> None:
    objects = render(EVERYTHING, "--set", "fullnameOverride=modelswarm")
    settings = parse_gateway(arguments(objects, "gateway"))
    assert settings.kubernetes
    assert settings.discovery_dir is None
    assert settings.namespaces == ("team-a",)
    assert settings.name == "modelswarm-gateway-7d9-x2x"
    assert (settings.http, settings.grpc, settings.metrics, settings.admin) == (
        "0.0.0.0:8000",
        "0.0.0.0:8001",
        "0.0.0.0:8002",
        "0.0.0.0:8003",
    )
    assert settings.vllm_metrics
    assert settings.cors_origins == ("https://chat.example.com", "http://[::1]:3000")
    assert settings.max_named_sessions == 5  # extraArgs are last, and override
    spec = find_object(objects, "Deployment", "modelswarm-gateway")["spec"]["template"]["spec"]
    leaving = settings.shutdown_delay_seconds + settings.drain_timeout_seconds
    assert spec["terminationGracePeriodSeconds"] >= leaving + 10


@EVERY_VALUES
def test_every_values_file_gives_accepted_flags(values: Path, tmp_path: Path) -> None:
    objects = render(values, "--set", "fullnameOverride=modelswarm")
    template = find_object(objects, "ConfigMap", "modelswarm-server-pod-template")["data"]
    (tmp_path / "server-pod-template.yaml").write_text(template["server-pod-template.yaml"])
    flags = arguments(objects, "operator")
    parse_operator([word.replace("/etc/modelswarm", str(tmp_path)) for word in flags])
    parse_gateway(arguments(objects, "gateway"))


def test_operator_has_exactly_the_rights_it_checks() -> None:
    needed = {
        _right(each)
        for each in (*access_review.swarm_permissions(), *access_review.node_permissions())
    }
    objects = render()
    assert (
        _granted(find_object(objects, "ClusterRole", f"{NAMESPACE}-modelswarm-operator")) == needed
    )
    lease = find_object(objects, "Role", "modelswarm-operator-lease")
    assert lease["metadata"]["namespace"] == NAMESPACE
    assert _granted(lease) == {_right(each) for each in access_review.lease_permissions()}
    for rule in lease["rules"]:
        assert rule.get("resourceNames", ["modelswarm-operator"]) == ["modelswarm-operator"]
        assert "resourceNames" in rule or rule["verbs"] == ["create"]


def test_namespaced_operator_has_no_right_elsewhere() -> None:
    objects = render(NAMESPACED)
    assert of_kind(objects, "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition") == []
    roles = [o for o in of_kind(objects, "Role") if o["metadata"]["name"] == "modelswarm-operator"]
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b"]
    for role in roles:
        assert _granted(role) == {_right(each) for each in access_review.swarm_permissions()}
    for binding in of_kind(objects, "RoleBinding"):
        assert [s["namespace"] for s in binding["subjects"]] == [NAMESPACE]


def test_no_right_is_a_wildcard_or_reads_secrets() -> None:
    for values in VALUES:
        for role in of_kind(render(values), "Role", "ClusterRole"):
            for group, resource, verb in _granted(role):
                assert "*" not in (group, resource, verb)
                assert resource != "secrets"


def test_gateway_may_only_watch_pods() -> None:
    role = find_object(render(), "ClusterRole", f"{NAMESPACE}-modelswarm-gateway")
    assert _granted(role) == {("", "pods", "list"), ("", "pods", "watch")}


def test_view_and_edit_roles_include_swarms() -> None:
    objects = render()
    view = find_object(objects, "ClusterRole", f"{NAMESPACE}-modelswarm-view")
    edit = find_object(objects, "ClusterRole", f"{NAMESPACE}-modelswarm-edit")
    aggregated = "rbac.authorization.k8s.io/aggregate-to-"
    assert {f"{aggregated}{level}" for level in ("view", "edit", "admin")} <= {
        *view["metadata"]["labels"]
    }
    assert f"{aggregated}view" not in edit["metadata"]["labels"]
    assert ("modelswarm.io", "modelswarms/scale", "update") in _granted(edit)


def test_no_rbac_object_is_created_unless_asked() -> None:
    """An account without the right to grant roles cannot install any."""
    kinds = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    assert of_kind(render(None, "--set", "rbac.create=false"), *kinds) == []


def test_large_number_of_a_values_file_is_a_whole_number(tmp_path: Path) -> None:
    """Helm reads such a number as a float, and would print 1e+06."""
    values = tmp_path / "values.yaml"
    values.write_text("gateway: {maxNamedSessions: 1000000}")
    assert "--max-named-sessions=1000000" in arguments(render(values), "gateway")


@pytest.mark.full
@pytest.mark.parametrize("keep", [True, False])
def test_crd_is_the_generated_one_and_kept_if_asked(keep: bool) -> None:
    (crd,) = of_kind(
        render(None, "--set", f"crds.keep={str(keep).lower()}"), "CustomResourceDefinition"
    )
    generated = yaml.safe_load((ROOT / "crds" / "modelswarm.io_modelswarms.yaml").read_text())
    assert crd["spec"] == generated["spec"]
    annotations = crd["metadata"].get("annotations", {})
    assert annotations.get("helm.sh/resource-policy") == ("keep" if keep else None)


@pytest.mark.full
def test_chart_copy_of_the_crd_is_the_generated_file() -> None:
    name = "modelswarm.io_modelswarms.yaml"
    assert (CHART / "files" / name).read_text() == (ROOT / "crds" / name).read_text()


@pytest.mark.full
def test_dashboards_are_labelled_config_maps() -> None:
    files = sorted((CHART / "dashboards").glob("*.json"))
    assert files
    objects = render()
    for file in files:
        found = find_object(objects, "ConfigMap", f"modelswarm-dashboard-{file.stem}")
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(found["data"][file.name]) == json.loads(file.read_text())


@pytest.mark.full
def test_pod_monitors_need_their_crd_and_name_real_ports() -> None:
    assert of_kind(render(EVERYTHING), "PodMonitor") == []
    objects = render(EVERYTHING, *MONITORING)
    monitors = of_kind(objects, "PodMonitor")
    assert {m["metadata"]["labels"]["release"] for m in monitors} == {"kube-prometheus-stack"}
    ports = {
        pod["metadata"]["name"]: {
            p["name"] for c in pod["spec"]["containers"] for p in c.get("ports", ())
        }
        for pod in pods(objects)
    }
    for component in ("operator", "gateway"):
        (endpoint,) = find_object(objects, "PodMonitor", f"swarm-{component}")["spec"][
            "podMetricsEndpoints"
        ]
        assert endpoint["port"] in ports[f"swarm-{component}"]


def test_alerts_are_those_of_the_file_for_this_installation() -> None:
    assert of_kind(render(EVERYTHING), "PrometheusRule") == []  # the cluster lacks the resource
    assert of_kind(render(None, *MONITORING), "PrometheusRule") == []  # not asked for
    named = find_object(render(EVERYTHING, *MONITORING), "PrometheusRule", "swarm")
    assert named["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert named["spec"] == yaml.safe_load(fill(RULES.read_text(), NAMESPACE, "team-a", "30"))
    flags = ("--set", "prometheusRule.enabled=true", *MONITORING)
    rules = find_object(render(None, *flags), "PrometheusRule", "modelswarm")
    assert rules["spec"] == yaml.safe_load(fill(RULES.read_text(), NAMESPACE, ".+", "60"))
    several = find_object(render(NAMESPACED, *flags), "PrometheusRule", "modelswarm")
    assert 'namespace=~"team-a|team-b"' in str(several["spec"])


def test_alerts_without_gateways_miss_no_gateway() -> None:
    flags = ("--set", "gateway.enabled=false", "--set", "gateway.url=https://ai.example.com")
    rules = find_object(render(EVERYTHING, *flags, *MONITORING), "PrometheusRule", "swarm")
    names = [group["name"] for group in rules["spec"]["groups"]]
    assert names == ["modelswarm-operator", "modelswarm-processes"]


@pytest.mark.full
def test_changed_server_pod_template_restarts_the_operator() -> None:
    name = "checksum/server-pod-template"
    plain, other = (
        find_object(
            render(None, "--set-json", f"serverPodTemplate={value}"),
            "Deployment",
            "modelswarm-operator",
        )
        for value in ("{}", '{"spec": {"hostIPC": false}}')
    )
    sums = [d["spec"]["template"]["metadata"]["annotations"][name] for d in (plain, other)]
    assert sums[0] != sums[1]


@pytest.mark.full
def test_chart_without_gateways_has_none_of_their_objects() -> None:
    flags = ("--set", "gateway.enabled=false", "--set", "gateway.url=https://ai.example.com")
    objects = render(EVERYTHING, *flags, *MONITORING, "--set", "fullnameOverride=modelswarm")
    assert [o["metadata"]["name"] for o in objects if "gateway" in o["metadata"]["name"]] == []
    assert "--gateway-url=https://ai.example.com" in arguments(objects, "operator")


def test_admin_port_stays_inside_the_cluster() -> None:
    objects = render(EVERYTHING, "--set", "gateway.service.type=LoadBalancer")
    clients = find_object(objects, "Service", "swarm-gateway")["spec"]
    assert {port["targetPort"] for port in clients["ports"]} == {"http", "grpc"}
    admin = find_object(objects, "Service", "swarm-gateway-admin")["spec"]
    assert admin["type"] == "ClusterIP"
    assert [(port["port"], port["targetPort"]) for port in admin["ports"]] == [(9003, "admin")]
    rules = find_object(objects, "NetworkPolicy", "swarm-gateway")["spec"]["ingress"]
    [rule] = [rule for rule in rules if {"port": 8003} in rule["ports"]]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"example.com/role": "admin"}}}]


def test_policy_for_clients_admits_the_pod_of_helm_test() -> None:
    objects = render(EVERYTHING)
    labels = find_object(objects, "Pod", "swarm-test-completion")["metadata"]["labels"]
    rules = find_object(objects, "NetworkPolicy", "swarm-gateway")["spec"]["ingress"]
    peers = [peer for peer in rules[0]["from"] if "podSelector" in peer]
    assert [peer for peer in peers if peer["podSelector"]["matchLabels"].items() <= labels.items()]
    assert {"namespaceSelector": {"matchLabels": {"example.com/ai": "yes"}}} in rules[0]["from"]


def test_pod_of_helm_test_runs_where_gateways_do() -> None:
    """In a cluster whose nodes are all tainted it would wait for ever."""
    spec = find_object(render(EVERYTHING), "Pod", "swarm-test-completion")["spec"]
    gateway = find_object(render(EVERYTHING), "Deployment", "swarm-gateway")
    theirs = gateway["spec"]["template"]["spec"]
    for name in ("nodeSelector", "tolerations"):
        assert theirs[name] and spec[name] == theirs[name]


@pytest.mark.full
def test_admin_port_is_loopback_without_its_service() -> None:
    flags = ("--set", "gateway.adminService.enabled=false", "--set", "networkPolicy.enabled=true")
    objects = render(None, *flags)
    assert "--admin=127.0.0.1:8003" in arguments(objects, "gateway")
    assert not [o for o in objects if o["metadata"]["name"].endswith("-admin")]
    rules = find_object(objects, "NetworkPolicy", "modelswarm-gateway")["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == {"http", "grpc", "metrics"}


@pytest.mark.full
def test_monitors_and_policies_know_server_ports() -> None:
    template = find_object(render(), "ConfigMap", "modelswarm-server-pod-template")["data"]
    patch = yaml.safe_load(template["server-pod-template.yaml"])
    assert patch["metadata"]["annotations"]["prometheus.io/port"] == str(METRICS_PORT)
    flags = ("--set", "networkPolicy.enabled=true", "--set", "podMonitor.enabled=true", *MONITORING)
    objects = render(None, *flags)
    (endpoint,) = find_object(objects, "PodMonitor", "modelswarm-server")["spec"][
        "podMetricsEndpoints"
    ]
    rules = find_object(objects, "NetworkPolicy", "modelswarm-servers")["spec"]["ingress"]
    open_ports = {port["port"] for rule in rules for port in rule["ports"]}
    assert {endpoint["port"]} | open_ports == {"links", "metrics"}


def test_operator_may_ask_servers_when_scrapers_are_named() -> None:
    flags = (
        "networkPolicy.enabled=true",
        "networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b",
    )
    objects = render(None, *(text for flag in flags for text in ("--set", flag)))
    rules = find_object(objects, "NetworkPolicy", "modelswarm-servers")["spec"]["ingress"]
    operators = find_object(objects, "Deployment", "modelswarm-operator")["spec"]["selector"]
    allowed = [
        peer["podSelector"]
        for rule in rules
        if rule["ports"] == [{"port": "metrics"}]
        for peer in rule["from"]
    ]
    assert operators in allowed


@pytest.mark.full
def test_chart_versions_are_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == make_images.project_version()


@pytest.mark.full
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("gateway.replicas=-1", ["gateway/replicas", "minimum"]),
        ("operator.replicas=two", ["operator/replicas", "want integer"]),
        ("image.pullPolicy=Sometimes", ["image/pullPolicy", "'Always', 'IfNotPresent', 'Never'"]),
        ("gateway.replica=3", ["/gateway", "additional properties 'replica' not allowed"]),
        ("gatway.replicas=3", ["additional properties 'gatway' not allowed"]),
        ("gateway.url=example.com", ["gateway/url", "does not match pattern"]),
        ("gateway.service.httpPort=70000", ["gateway/service/httpPort", "maximum"]),
        ("gateway.corsOrigins={https://a.example/}", ["gateway/corsOrigins/0", "does not match pattern"]),
        ("gateway.corsOrigins={https://a.example:443}", ["gateway/corsOrigins/0", "'not' failed"]),
        ("gateway.corsOrigins={*,https://a.example}", ["gateway/corsOrigins", "maxItems"]),
        ("watchNamespaces={Team_A}", ["watchNamespaces/0", "does not match pattern"]),
        ("serverPodTemplate.containers=3", ["/serverPodTemplate", "'containers' not allowed"]),
        ("networkPolicy.clientsFrom[0].podSelector.x=y", ["clientsFrom", "networkPolicy.enabled"]),
        (
            "gateway.adminService.enabled=false,networkPolicy.adminFrom[0].podSelector.x=y",
            ["adminFrom", "gateway.adminService.enabled"],
        ),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_the_field(flag: str, words: list[str]) -> None:
    error = refusal("--set", flag)
    for word in words:
        assert word in error


@pytest.mark.full
def test_old_kubernetes_is_refused() -> None:
    assert "1.33" in refusal("--kube-version", "1.30.0")


@pytest.mark.full
def test_names_fit_for_any_release_name() -> None:
    long = "a" * 53  # the longest name that helm accepts
    for values, found in product((None, EVERYTHING), ("x", long)):
        text = NO_CLUSTER.helm(
            "template", found, str(CHART), *(("-f", str(values)) if values else ())
        )
        for thing in yaml.safe_load_all(text):
            if thing:
                assert len(thing["metadata"]["name"]) <= 63 + len(NAMESPACE)
                assert (
                    len(thing["metadata"].get("labels", {}).get("app.kubernetes.io/instance", ""))
                    <= 63
                )


def test_hold_limit_is_that_of_the_swarm_alone() -> None:
    """Every server announces `sessions.holdLimit`, so a value of the chart would have no effect."""
    flags = arguments(render(EVERYTHING, "--set", "fullnameOverride=modelswarm"), "gateway")
    assert not [flag for flag in flags if flag.startswith("--hold-limit")]
    assert "holdLimitSeconds" in refusal("--set", "gateway.holdLimitSeconds=60")


def test_docs_list_every_value_with_its_default() -> None:
    """tools/make_chart_docs.py writes the table from values.yaml."""
    page = (ROOT / "docs" / "install.md").read_text()
    assert replace_table(page) == page


def test_commands_and_values_of_the_docs_are_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    commands = re.findall(
        r"^helm (?:install|upgrade) modelswarm charts/modelswarm (.*)$", page, re.MULTILINE
    )
    assert len(commands) >= 3
    for command in commands:
        words = [
            word
            for word in shlex.split(command)
            if word not in ("--wait", "--reset-then-reuse-values")
        ]
        assert find_object(render(None, *words), "Deployment", "modelswarm-operator")
    documents = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(documents) >= 2
    for number, document in enumerate(documents):
        file = tmp_path / f"{number}.yaml"
        file.write_text(document)
        template = find_object(render(file), "ConfigMap", "modelswarm-server-pod-template")["data"]
        wanted = yaml.safe_load(document)["serverPodTemplate"]["spec"]
        assert yaml.safe_load(template["server-pod-template.yaml"])["spec"] == wanted


def test_every_value_is_documented_and_in_the_schema() -> None:
    described = {value.path for value in read_values()}
    schema = json.loads((CHART / "values.schema.json").read_text())
    for path in _leaves(yaml.safe_load((CHART / "values.yaml").read_text())):
        assert any(path == each or path.startswith(f"{each}.") for each in described), path
    for path in described:
        node = schema
        for part in path.split("."):
            node = node["properties"][part]
            node = schema["$defs"][node["$ref"].split("/")[-1]] if "$ref" in node else node


def _leaves(tree: Object, prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found += _leaves(value, f"{path}.") if isinstance(value, dict) and value else [path]
    return found


def _right(need: access_review.Permission) -> tuple[str, str, str]:
    return need.kind.group, need.resource, need.verb


def _granted(role: Object) -> set[tuple[str, str, str]]:
    return {
        each
        for rule in role["rules"]
        for each in product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }
