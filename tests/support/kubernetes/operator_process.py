"""The operator's real process with minimal rights, against an API server or a proxy in front of it.

Used by the operator's tests and benchmarks. Starts, kills, stops and probes it; knows no expectation.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import httpx
from support.kubernetes.api_client import USER, ApiClient
from support.processes.forked_process import ForkedProcess, fork_process

from modelswarm.local.commands import child_environment
from modelswarm_operator.kube.access_review import (
    Permission,
    lease_permissions,
    node_permissions,
    swarm_permissions,
)
from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.network.ports import free_ports
from tools.devcluster.waiting import wait_for

ACCOUNT = "operator"
START_SECONDS = 180.0
STOP_SECONDS = 60.0  # seconds; generous, as the exit code tells a graceful stop from a forced one


def grant(level: ApiLevel, namespace: str, without: Iterable[tuple[str, str]] = ()) -> None:
    """Make an account in the namespace with exactly the operator's rights, except `without` (resource, verb).

    A removed right is refused when this returns; a new one is granted soon after.
    """
    left_out = set(without)
    rules = _rules([*swarm_permissions(), *lease_permissions()], left_out)
    node_rules = _rules(list(node_permissions()), left_out)
    level.kubectl.in_namespace(namespace).apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}},
        {**_role("Role", ACCOUNT), "rules": rules},
        _binding("RoleBinding", "Role", ACCOUNT, namespace),
        {**_role("ClusterRole", f"{namespace}-nodes"), "rules": node_rules},
        _binding("ClusterRoleBinding", "ClusterRole", f"{namespace}-nodes", namespace),
    )
    if left_out:
        with ApiClient(level) as plain:
            for need in (*swarm_permissions(), *lease_permissions(), *node_permissions()):
                if (need.resource, need.verb) in left_out:
                    what = f"{need.verb} {need.resource} to be refused"
                    wait_for(
                        what,
                        partial(_is_refused, plain, namespace, need),
                        START_SECONDS,
                        every=0.02,
                    )


def _is_refused(plain: ApiClient, namespace: str, need: Permission) -> bool:
    where = namespace if need.kind.namespaced else ""
    user = USER.format(namespace, ACCOUNT)
    return not plain.is_allowed(user, need.verb, need.resource, where, need.kind.group)


def _rules(wanted: list[Permission], left_out: set[tuple[str, str]]) -> list[dict[str, list[str]]]:
    return [
        {"apiGroups": [need.kind.group], "resources": [need.resource], "verbs": [need.verb]}
        for need in wanted
        if (need.resource, need.verb) not in left_out
    ]


def _role(kind: str, name: str) -> dict[str, object]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name},
    }


def _binding(kind: str, role: str, name: str, namespace: str) -> dict[str, object]:
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": name}
    return {**_role(kind, name), "roleRef": reference, "subjects": [subject]}


class Operator:
    """One process after another, with the same flags and one log file."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        folder: Path,
        *flags: str,
        elect: bool = False,
        fork: bool = True,
    ) -> None:
        """Prepare a process. `fork`: start it from a process that has imported everything, in a tenth of the time.

        Benchmarks, and tests that measure its memory, start it by exec.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_ports(1)[0]
        self.log = folder / f"operator-{self.port}.log"
        self._arguments = [
            *("--server-image", "localhost/server:1", "--kubeconfig", str(kubeconfig)),
            *("--namespace", namespace, "--metrics", f"127.0.0.1:{self.port}", "--resync", "5"),
            *(("--lease-namespace", namespace) if elect else ("--no-leader-election",)),
            *flags,
        ]
        self._fork = fork
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._log_read = 0  # length of the log of earlier tests

    def __enter__(self) -> Operator:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> Operator:
        command = (sys.executable, "-m", "modelswarm_operator", *self._arguments)
        env = child_environment(1)
        with self.log.open("ab") as log:
            if self._fork:
                self._process = fork_process(command, env, log)
            else:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
                )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes] | ForkedProcess:
        if self._process is None:
            raise RuntimeError("the operator was not started")
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Send SIGTERM, and return the exit code."""
        self.send(signal.SIGTERM)
        return self.process.wait(seconds)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        wait_for("the operator to be ready", self.is_ready, seconds, every=0.05, explain=self.text)

    def is_ready(self) -> bool:
        return self.probe("ready")[0] == 200

    def probe(self, name: str) -> tuple[int, str]:
        """Return code and text; 0 if nothing answers."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/{name}", timeout=5)
        except httpx.TransportError:
            return 0, ""
        return answer.status_code, answer.text

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of that name with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in self.probe("metrics")[1].splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == name and all(each in series for each in wanted):
                total += float(value)
        return total

    def leads(self) -> bool:
        return self.metric("modelswarm_operator_leader") == 1.0

    def text(self) -> str:
        """Return the log since `forget_log`."""
        return self._whole_log()[self._log_read :]

    def forget_log(self) -> None:
        self._log_read = len(self._whole_log())

    def _whole_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def check_log(self) -> None:
        """Check that the log has no traceback and no pending task."""
        for sign in ("Traceback", "never awaited", "never retrieved"):
            assert sign not in self.text(), self.text()[-6000:]


def shown(thing: object) -> str:
    return json.dumps(thing, indent=1, sort_keys=True)
