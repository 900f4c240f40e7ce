"""Values and names that the chart must render as they are: numbers as text, one entry for each key, own labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.kubernetes.chart import CHART, NO_CLUSTER, Object, find_object, of_kind, pods, render


@pytest.mark.parametrize(("release", "namespace"), [("no", "404"), ("1e3", "on")])
def test_names_that_yaml_reads_as_values_stay_text(release: str, namespace: str) -> None:
    """Tenants have numbers, and countries the code NO."""
    flags = ("--namespace", namespace, "--set", "networkPolicy.enabled=true")
    watched = ("--set-json", 'watchNamespaces=["404","no"]')
    for more in ((), watched):
        text = NO_CLUSTER.helm("template", release, str(CHART), *flags, *more)
        for found in filter(None, yaml.safe_load_all(text)):
            meta = found["metadata"]
            assert isinstance(meta.get("namespace", ""), str), found
            assert all(isinstance(label, str) for label in meta["labels"].values()), found
            for subject in found.get("subjects", ()):
                assert isinstance(subject["namespace"], str)


def test_http_port_of_a_balancer_has_no_protocol_to_probe() -> None:
    """Azure's load balancers probe `GET /` where appProtocol is http, and the gateway answers with 404."""
    service = find_object(
        render(None, "--set", "gateway.service.type=LoadBalancer"), "Service", "modelswarm-gateway"
    )
    assert {p["name"]: p.get("appProtocol") for p in service["spec"]["ports"]} == {
        "http": None,
        "grpc": "kubernetes.io/h2c",
    }


def spread(tmp_path: Path, *constraints: Object) -> list[Object]:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"gateway": {"topologySpreadConstraints": [*constraints]}}))
    gateway = find_object(render(values), "Deployment", "modelswarm-gateway")
    found: list[Object] = gateway["spec"]["template"]["spec"]["topologySpreadConstraints"]
    selector = gateway["spec"]["selector"]
    assert all(one["labelSelector"] in (selector, {}) for one in found)
    return found


def test_spreading_without_a_selector_counts_the_gateways(tmp_path: Path) -> None:
    """A constraint without labelSelector matches no pod, so it would have no effect."""
    rule = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    other = {**rule, "topologyKey": "rack", "labelSelector": {}}
    found = spread(tmp_path, rule, other)
    assert [one["topologyKey"] for one in found] == ["zone", "rack"]
    assert found[0] == {**rule, "labelSelector": found[0]["labelSelector"]} and found[1] == other
    (default,) = spread(tmp_path)
    assert default["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize("component", ["operator", "gateway"])
def test_own_annotation_replaces_that_of_scraping(component: str) -> None:
    """Two equal keys are an error for Flux and kustomize."""
    key = f"{component}.podAnnotations.prometheus\\.io/scrape=false"
    text = NO_CLUSTER.helm("template", "modelswarm", str(CHART), "--set-string", key)
    (deployment,) = (
        part for part in text.split("\n---\n")
        if "kind: Deployment" in part and f"name: modelswarm-{component}\n" in part
    )  # fmt: skip
    assert deployment.count("prometheus.io/scrape") == 1
    annotations = yaml.safe_load(deployment)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "false" and annotations["prometheus.io/port"]
    assert render(None, "--set", f"{component}.podAnnotations=null")


def test_images_are_pinned_by_digest() -> None:
    digest = f"@sha256:{'0a' * 32}"
    flags = [f"{name}.image.tag=0.1.0{digest}" for name in ("operator", "gateway", "server")]
    objects = render(None, *(word for flag in flags for word in ("--set", flag)))
    images = {c["image"] for pod in pods(objects) for c in pod["spec"]["containers"]}
    assert {image.partition("@")[0].rpartition("/")[2] for image in images} == {
        "operator:0.1.0",
        "gateway:0.1.0",
    }
    assert all(image.endswith(digest) for image in images)
    assert f"server:0.1.0{digest}" in str(find_object(objects, "Deployment", "modelswarm-operator"))


def test_number_of_gateways_can_be_an_autoscalers() -> None:
    objects = render(None, "--set", "gateway.replicas=null")
    assert "replicas" not in find_object(objects, "Deployment", "modelswarm-gateway")["spec"]
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert [one["metadata"]["name"] for one in budgets] == [
        "modelswarm-operator",
        "modelswarm-gateway",
    ]
    assert len(of_kind(render(None, "--set", "gateway.replicas=0"), "PodDisruptionBudget")) == 1
