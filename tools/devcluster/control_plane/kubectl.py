"""kubectl and helm as tests run them: against one kubeconfig, with the command and its output in every failure.

Used by tests and by the cluster's own parts. Knows nothing of the cluster behind the kubeconfig.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.devcluster.build.build import program_path
from tools.devcluster.control_plane.kubeconfig import existing_kubeconfig
from tools.devcluster.waiting import NoResponse, wait_for

COMMAND_SECONDS = 120.0
READS = {"get", "describe", "logs", "events", "api-resources"}  # verbs that change nothing
# Reasons of a refusal. Any other error may pass: the server starts, is overloaded or has lost etcd.
REFUSALS = ("NotFound", "Forbidden", "Unauthorized", "BadRequest", "Invalid", "MethodNotAllowed")


class CommandFailed(AssertionError):
    """A command has exited with an error. `stderr` has its output."""

    def __init__(self, command: Sequence[str], code: int, stdout: str, stderr: str) -> None:
        super().__init__(f"{' '.join(command)} exited with {code}\n{stdout}{stderr}")
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


class Unanswered(CommandFailed, NoResponse):
    """A reading command to which the server said neither yes nor no."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Commands of one user in one namespace."""

    kubeconfig: Path
    namespace: str = "default"

    def in_namespace(self, namespace: str) -> Kubectl:
        return Kubectl(self.kubeconfig, namespace)

    def __call__(self, *words: str, stdin: str = "", seconds: float = COMMAND_SECONDS) -> str:
        """Run `kubectl WORDS` and return its output."""
        command = (str(program_path("kubectl")), *words)
        return self._run(command, stdin, seconds)

    def helm(self, *words: str, seconds: float = 300.0) -> str:
        return self._run((str(program_path("helm")), *words), "", seconds)

    def apply(self, *objects: dict[str, Any] | str) -> str:
        """Apply objects, as dicts or as YAML text, by server-side apply."""
        texts = [thing if isinstance(thing, str) else json.dumps(thing) for thing in objects]
        text = "\n---\n".join(texts)
        return self("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)

    def get(self, *words: str) -> Any:
        """Return one object or a List, parsed."""
        return json.loads(self("get", *words, "-o", "json"))

    def find(self, kind: str, name: str) -> Any | None:
        """Return an object, or None."""
        text = self("get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def items(self, kind: str, selector: str = "") -> list[Any]:
        chosen = ("-l", selector) if selector else ()
        return list(self.get(kind, *chosen)["items"])

    def condition(self, kind: str, name: str, condition: str) -> str:
        """Return `True`, `False`, `Unknown`, or an empty text when there is no such condition."""
        found = self.find(kind, name) or {}
        for each in (found.get("status") or {}).get("conditions") or ():
            if each["type"] == condition:
                return str(each["status"])
        return ""

    def wait_condition(
        self, kind: str, name: str, condition: str, seconds: float, status: str = "True"
    ) -> None:
        wait_for(
            f"{kind} {name} {condition}={status}",
            lambda: self.condition(kind, name, condition) == status,
            seconds,
            every=0.25,
            explain=lambda: self("describe", kind, name),
        )

    def wait_gone(self, kind: str, name: str, seconds: float) -> None:
        wait_for(
            f"{kind} {name} gone",
            lambda: self.find(kind, name) is None,
            seconds,
            every=0.25,
            explain=lambda: self("describe", kind, name),
        )

    def caches(self) -> dict[str, str]:
        """Return variables that put caches of discovery and charts below the cluster's folder, which goes with it."""
        if existing_kubeconfig() is not None or not self.kubeconfig.is_file():
            return {}
        folder = self.kubeconfig.parent / "caches"
        helm = {
            f"HELM_{kind.upper()}_HOME": str(folder / kind) for kind in ("cache", "config", "data")
        }
        return {"KUBECACHEDIR": str(folder / "kube"), **helm}

    def _run(self, command: Sequence[str], stdin: str, seconds: float) -> str:
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "HELM_NAMESPACE": self.namespace,
            **self.caches(),
        }
        if Path(command[0]).name == "kubectl" and self.namespace != "default":
            # The flag also forbids objects of other namespaces; so the default namespace gets none.
            command = (command[0], f"--namespace={self.namespace}", *command[1:])
        done = subprocess.run(
            command,
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != 0:
            is_read = not READS.isdisjoint(command[1:3])  # behind the namespace, if there is one
            refused = any(f"({reason})" in done.stderr for reason in REFUSALS)
            failed = Unanswered if is_read and not refused else CommandFailed
            raise failed(command, done.returncode, done.stdout, done.stderr)
        return done.stdout
