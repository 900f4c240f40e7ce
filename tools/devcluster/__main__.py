"""The command line behind `make cluster`, `cluster-down`, `cluster-packages`, `cluster-ready` and `full-ready`.

    python -m tools.devcluster up [--nodes 2] [--gpus 4] [--api-only] [--state DIR] [--no-images]
                                  [--image ARCHIVE ...]
    python -m tools.devcluster down [--state DIR]
    python -m tools.devcluster build [PART ...]
    python -m tools.devcluster packages
    python -m tools.devcluster prepare [--browser]

Each verb says first what it will do and how long that takes, and ends with an error at once where it can't.
Progress goes to stderr; stdout is the one line that a shell may evaluate: `export KUBECONFIG=...`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from tools.devcluster.build import build, packages
from tools.devcluster.build.preparation import (
    API_LEVEL,
    API_TESTS,
    CLUSTER,
    START_MINUTES,
    TESTS,
    Wanted,
    announce,
    plan,
    prepare,
)
from tools.devcluster.build.project_images import project_archives
from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.control_plane.kubeconfig import existing_kubeconfig
from tools.devcluster.down import PARENT, PREFIX, remove_cluster
from tools.devcluster.existing import ExistingCluster
from tools.devcluster.layout import Layout
from tools.devcluster.nodes.guest import write_tools
from tools.devcluster.real import RealCluster, RealSettings
from tools.devcluster.record import write_record
from tools.devcluster.reporting import tell

DEFAULT_STATE = PARENT / PREFIX
API_ONLY = "An API server without nodes needs less: python -m tools.devcluster up --api-only"


def main() -> None:
    chosen = _parser().parse_args()
    try:
        if chosen.verb == "up":
            _up(chosen)
        elif chosen.verb == "down":
            _down(Layout(chosen.state.resolve()))
        elif chosen.verb == "packages":
            wanted = {**TESTS.packages, **packages.BROWSER_PACKAGES}
            packages.install(packages.missing_packages(wanted))
        elif chosen.verb == "prepare":
            _prepare_for_tests(packages.BROWSER_PACKAGES if chosen.browser else {})
        else:
            for name in chosen.part or [each.name for each in build.PARTS]:
                print(build.build_part(build.find_part(name)))
    except (build.BuildError, RuntimeError) as problem:
        raise SystemExit(str(problem)) from problem


def _up(chosen: argparse.Namespace) -> None:
    given = existing_kubeconfig()
    if given is not None:
        tell(f"using the existing cluster: {ExistingCluster(given).describe()}")
        print(f"export KUBECONFIG={given}")
        return
    layout = Layout(chosen.state.resolve())
    if layout.record.exists():
        raise SystemExit(f"a cluster runs in {layout.root}: make cluster-down first")
    _make_ready(chosen)
    try:
        _start(layout, chosen)
    except BaseException:
        if layout.record.exists():
            remove_cluster(layout)
        raise
    tools = "kubectl is" if chosen.api_only else "kubectl and helm are"
    tell(f"The cluster runs. {tools} in {layout.root}/bin; `make cluster-down` ends it.")
    print(f"export KUBECONFIG={layout.kubeconfig}")


def _make_ready(chosen: argparse.Namespace) -> None:
    """Install and build what is missing, or stop before anything is done."""
    if chosen.api_only:
        wanted, problems = API_LEVEL, packages.build_obstacles()
        then = "start etcd and an API server, without nodes and controllers (10 s)"
    else:
        wanted, problems = CLUSTER, packages.machine_obstacles()
        then = f"start a control plane and {chosen.nodes} nodes ({60 * START_MINUTES:.0f} s)"
    if chosen.no_images:
        wanted = Wanted(wanted.packages, wanted.parts, images=False)
    if problems:
        hint = [] if packages.build_obstacles() else [API_ONLY]
        raise SystemExit("\n".join(["make cluster can't run here:", *problems, *hint]))
    found = plan(wanted)
    packages.check_installable(found.packages)
    announce("make cluster", found, then)
    prepare(found)


def _start(layout: Layout, chosen: argparse.Namespace) -> None:
    if chosen.api_only:
        write_record(layout.make(), octet=-1, nodes=0, ends_with_owner=False)
        ApiLevel(layout, ApiSettings(ends_with_owner=False)).start()
        write_tools(layout, ("kubectl",))
        return
    archives = () if chosen.no_images else project_archives()
    archives += tuple(file.resolve() for file in chosen.image)
    settings = RealSettings(
        nodes=chosen.nodes, gpus=chosen.gpus, ends_with_owner=False, archives=archives
    )
    RealCluster(layout, settings).start()


def _prepare_for_tests(browser: dict[str, str]) -> None:
    """Make ready what this machine can run. What is missing fails with REQUIRE_CLUSTER=1; else tests are skipped.

    `browser`: further packages, of the tests that open a page.
    """
    problems = packages.machine_obstacles()
    if not packages.platform_obstacles():
        problems += packages.install_obstacles(TESTS.packages)
    no_browser = packages.install_obstacles(browser)
    if (problems or no_browser) and os.environ.get("REQUIRE_CLUSTER") == "1":
        first = "REQUIRE_CLUSTER=1, and this machine can't run all tests:"
        raise SystemExit("\n".join([first, *problems, *no_browser]))
    no_api = packages.build_obstacles() or packages.install_obstacles(API_LEVEL.packages)
    skipped = "tests of the Kubernetes API and on real nodes" if no_api else "tests on real nodes"
    for problem in problems:
        tell(f"{skipped} will be skipped: {problem}")
    for problem in no_browser:
        tell(f"tests of the page in a browser will be skipped: {problem}")
    wanted = API_TESTS if problems else TESTS
    if no_api:
        wanted = Wanted({}, (), images=False)
    if not no_browser:
        wanted = replace(wanted, packages={**wanted.packages, **browser})
    found = plan(wanted)
    if no_api and not found.packages:
        return
    announce("make full-ready" if browser else "make cluster-ready", found)
    prepare(found)


def _down(layout: Layout) -> None:
    if os.environ.get("CLUSTER") == "existing":
        tell("CLUSTER=existing: make cluster-down ends only clusters that make cluster has started")
        return
    if not layout.record.exists():
        tell(f"no cluster in {layout.root}")
        return
    tell(remove_cluster(layout))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.devcluster")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a cluster")
    up.add_argument("--nodes", type=int, default=2, choices=range(1, 10), metavar="1-9")
    up.add_argument("--gpus", type=int, default=4, help="in every node's status")
    up.add_argument(
        "--api-only", action="store_true", help="etcd and API server, no nodes, no controllers"
    )
    up.add_argument("--no-images", action="store_true", help="without the project's own images")
    up.add_argument("--image", type=Path, nargs="*", default=[], help="OCI archives to import")
    down = verbs.add_parser("down", help="remove it: nothing is left")
    for verb in (up, down):
        verb.add_argument("--state", type=Path, default=DEFAULT_STATE, help="its folder")
    made = verbs.add_parser("build", help="build the programs")
    made.add_argument("part", nargs="*", help=", ".join(part.name for part in build.PARTS))
    verbs.add_parser("packages", help="install the Debian packages")
    prepared = verbs.add_parser("prepare", help="all that the tests need, as far as possible here")
    prepared.add_argument("--browser", action="store_true", help="Chromium too, for tests of pages")
    return parser


if __name__ == "__main__":
    main()
