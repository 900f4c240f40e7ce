"""The command line behind `make cluster` and `make cluster-down`.

    python -m tools.devcluster up [--nodes 2] [--gpus 4] [--api-only] [--state DIR] [--no-images]
                                               [--image ARCHIVE ...]
    python -m tools.devcluster down [--state DIR]
    python -m tools.devcluster build [PART ...]
    python -m tools.devcluster packages
    python -m tools.devcluster prepare

Progress goes to stderr; stdout is the one line that a shell may evaluate: `export KUBECONFIG=...`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tools.devcluster.build import build, packages
from tools.devcluster.build.images import pause_archive
from tools.devcluster.build.project_images import project_archives
from tools.devcluster.chosen import existing_kubeconfig
from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.down import PARENT, PREFIX, take_down
from tools.devcluster.existing import ExistingCluster
from tools.devcluster.layout import Layout
from tools.devcluster.real import RealCluster, RealSettings
from tools.devcluster.record import write_record

DEFAULT_STATE = PARENT / PREFIX


def main() -> None:
    chosen = _parser().parse_args()
    try:
        if chosen.verb == "up":
            _up(chosen)
        elif chosen.verb == "down":
            _down(Layout(chosen.state.resolve()))
        elif chosen.verb == "packages":
            packages.install()
        elif chosen.verb == "prepare":
            _prepare()
        else:
            for name in chosen.part or [each.name for each in build.PARTS]:
                print(build.build(build.part(name)))
    except (build.CannotBuild, RuntimeError) as problem:
        raise SystemExit(str(problem)) from problem


def _up(chosen: argparse.Namespace) -> None:
    given = existing_kubeconfig()
    if given is not None:
        print(f"using the existing cluster: {ExistingCluster(given).describe()}", file=sys.stderr)
        print(f"export KUBECONFIG={given}")
        return
    layout = Layout(chosen.state.resolve())
    if layout.record.exists():
        raise SystemExit(f"a cluster runs in {layout.root}: make cluster-down first")
    problems = [] if chosen.api_only else packages.obstacles()
    for problem in problems:
        print(f"no real nodes: {problem}", file=sys.stderr)
    try:
        _start(layout, chosen, api_only=bool(chosen.api_only or problems))
    except BaseException:
        if layout.record.exists():
            take_down(layout)
        raise
    print(f"export KUBECONFIG={layout.kubeconfig}")


def _start(layout: Layout, chosen: argparse.Namespace, *, api_only: bool) -> None:
    if api_only:
        write_record(layout.make(), octet=-1, nodes=0, tied=False)
        ApiLevel(layout, ApiSettings(controller_manager=True, scheduler=True, tied=False)).start()
        return
    archives = () if chosen.no_images else project_archives()
    archives += tuple(file.resolve() for file in chosen.image)
    settings = RealSettings(nodes=chosen.nodes, gpus=chosen.gpus, tied=False, archives=archives)
    RealCluster(layout, settings).start()


def _prepare() -> None:
    """What is missing is said, not raised: the tests that need it are skipped and say it again."""
    try:
        packages.install()
    except packages.CannotInstall as refusal:
        print(refusal, file=sys.stderr)
    problems = packages.obstacles()
    for problem in problems:
        print(f"no real nodes: {problem}", file=sys.stderr)
    if not packages.can_build():
        return
    for part in build.PARTS:
        build.build(part)
    if not problems:
        pause_archive()
        project_archives()


def _down(layout: Layout) -> None:
    if os.environ.get("CLUSTER") == "existing":
        print("an existing cluster is not ours to take down", file=sys.stderr)
        return
    if not layout.record.exists():
        print(f"no cluster in {layout.root}", file=sys.stderr)
        return
    print(take_down(layout), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.devcluster")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a cluster")
    up.add_argument("--nodes", type=int, default=2, choices=range(1, 10), metavar="1-9")
    up.add_argument("--gpus", type=int, default=4, help="in every node's status")
    up.add_argument(
        "--api-only", action="store_true", help="no nodes: etcd, API server, controllers"
    )
    up.add_argument("--no-images", action="store_true", help="without the project's own images")
    up.add_argument("--image", type=Path, nargs="*", default=[], help="OCI archives to import")
    down = verbs.add_parser("down", help="take it away: nothing is left")
    for verb in (up, down):
        verb.add_argument("--state", type=Path, default=DEFAULT_STATE, help="its folder")
    made = verbs.add_parser("build", help="build the programs")
    made.add_argument("part", nargs="*", help=", ".join(part.name for part in build.PARTS))
    verbs.add_parser("packages", help="install the Debian packages")
    verbs.add_parser("prepare", help="packages, programs and images, as far as possible here")
    return parser


if __name__ == "__main__":
    main()
