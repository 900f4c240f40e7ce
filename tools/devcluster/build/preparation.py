"""Prepares a machine for a cluster: Debian packages, programs, images. Says first what is missing, and the minutes.

Used by the command line. What is there already costs nothing and is not mentioned. Programs are built in two lanes.
One builds Kubernetes' own parts one after another, because they share packages. The other builds all others beside
them, whose downloads and linking leave a core free. Images are built in a third; torch, if it is missing, is
downloaded in a fourth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tools.devcluster.build import images, packages, project_images, torch_packages
from tools.devcluster.build.build import Part, build_part, cache_folder, find_part, part_folder
from tools.devcluster.reporting import progress, tell

API_PARTS = ("etcd", "kube-api")
CLUSTER_PARTS = (
    *("etcd", "kube-api", "kube-control", "kube-node"),
    *("containerd", "coredns", "pause", "helm"),
)
TEST_PARTS = (*CLUSTER_PARTS, "kwok")
PACKAGES_MINUTES = 1.0
BASE_MINUTES = 1.5
PROJECT_MINUTES = 4.5  # with their dependencies
TORCH_MINUTES = 2.0
CHANGED_MINUTES = 1.0  # when only the project's own code has changed
LANES = 2  # builds at the same time
START_MINUTES = 0.5


@dataclass(frozen=True, slots=True)
class Wanted:
    """The needs of one verb."""

    packages: dict[str, str]
    parts: tuple[str, ...]
    images: bool


API_LEVEL = Wanted(packages.API_PACKAGES, API_PARTS, images=False)
API_TESTS = Wanted(packages.API_PACKAGES, (*API_PARTS, "helm"), images=False)
CLUSTER = Wanted({**packages.API_PACKAGES, **packages.NODE_PACKAGES}, CLUSTER_PARTS, images=True)
TESTS = Wanted({**CLUSTER.packages, **packages.TEST_PACKAGES}, TEST_PARTS, images=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of it that is missing."""

    packages: list[str]
    parts: list[Part]
    base_image: bool
    project_images: bool
    torch: bool

    @property
    def minutes(self) -> float:
        """Estimated on two cores, with downloads of an ordinary line."""
        lanes = _lanes(self.parts)
        building = max((sum(each.minutes for each in lane) for lane in lanes), default=0.0)
        total = sum(each.minutes for each in self.parts)
        project = CHANGED_MINUTES if project_images.was_built_before() else PROJECT_MINUTES
        made = BASE_MINUTES * self.base_image + project * self.project_images
        made = max(made, TORCH_MINUTES * self.torch)
        # Two cores compile for both lanes: side by side they save a quarter.
        beside = max(building, 0.75 * total, made)
        return PACKAGES_MINUTES * bool(self.packages) + beside

    def lines(self) -> list[str]:
        found = []
        if self.packages:
            found.append(f"install Debian packages: {', '.join(self.packages)}")
        if self.parts:
            names = ", ".join(each.name for each in self.parts)
            found.append(f"build from source, once: {names}")
        if self.base_image:
            found.append("make a Debian image with Python (debootstrap)")
        if self.project_images:
            found.append("build the project's images: operator, gateway, server")
        if self.torch:
            python = torch_packages.IMAGE_PYTHON
            found.append(f"download torch for Python {python}, which the images have (5 GB)")
        return found


def plan(wanted: Wanted) -> Plan:
    return Plan(
        packages.missing_packages(wanted.packages),
        [each for each in map(find_part, wanted.parts) if not part_folder(each).is_dir()],
        wanted.images and not images.base_file().exists(),
        wanted.images and not project_images.folder().is_dir(),
        wanted.images and torch_packages.is_missing(),
    )


def announce(verb: str, found: Plan, then: str = "") -> None:
    """Say what will be done and how long it takes. `then` is what the verb itself does afterwards."""
    lines = found.lines()
    if not lines:
        tell(f"{verb}: everything is built{'; ' if then else ''}{then}")
        return
    tell(f"{verb} will, in about {max(1.0, found.minutes):.0f} min:")
    for line in (*lines, *((then,) if then else ())):
        tell(f"  - {line}")
    tell(f"What is built is kept in {cache_folder()}.")


def prepare(found: Plan) -> None:
    """Install packages, then build programs and images side by side. The first error ends it."""
    if found.packages:
        with progress(f"Debian packages {', '.join(found.packages)}"):
            packages.install(found.packages)
    jobs: list[Callable[[], object]] = [_job(lane) for lane in _lanes(found.parts)]
    if found.base_image or found.project_images:
        jobs.append(_make_images)
    if found.torch:
        jobs.append(torch_packages.torch_packages)
    _run_together(jobs)


def _lanes(parts: Iterable[Part]) -> list[list[Part]]:
    listed = list(parts)
    kube = [each for each in listed if each.folder == "kube"]
    others = [each for each in listed if each.folder != "kube"]
    return [lane for lane in (kube, others) if lane]


def _job(lane: Sequence[Part]) -> Callable[[], None]:
    def run() -> None:
        for each in lane:
            build_part(each)

    return run


def _make_images() -> None:
    images.base_archive()
    project_images.project_archives()


def _run_together(jobs: Sequence[Callable[[], object]]) -> None:
    if not jobs:
        return
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
