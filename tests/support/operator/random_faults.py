"""Faults, edits and operator crashes in random order over a model cluster, with oracles after every step.

Used by the property tests. A run is a list of small numbers, so that hypothesis can shrink it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from support.operator.model_cluster import ModelCluster, Node, Pod, inspect_demo_model

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import Decision, DeletePod
from modelswarm_operator.reconcile.state.observed import Observed

Step = tuple[int, int]  # the index of a fault, and a number that selects its target or value


class RandomFaults:
    """Applies steps to a cluster and checks the invariants after each of them."""

    def __init__(self, cluster: ModelCluster) -> None:
        self.cluster = cluster
        self.past_observations: list[Observed] = []  # a slow operator may still act on these
        self.faults: list[Callable[[int], None]] = [
            self.run_turn, self.run_turn, self.run_turn, self.pass_time, self.pass_time,
            self.crash_in_turn, self.act_on_stale_swarm, self.act_on_stale_pods,
            self.delete_pod, self.force_delete_pod, self.fail_pod, self.preempt_pod,
            self.set_node_not_ready, self.set_node_ready, self.delete_node, self.add_node,
            self.cordon_node, self.uncordon_node,
            self.change_replicas, self.change_spans, self.change_served_name,
            self.change_pod_template, self.change_surge, self.change_pause, self.change_quota,
            self.crash_containers, self.change_keep_annotation, self.edit_pod_label,
            self.lose_status, self.delete_child, self.change_model, self.fail_inspections,
        ]  # fmt: skip

    def apply_steps(self, steps: Sequence[Step]) -> None:
        for which, number in steps:
            self.faults[which % len(self.faults)](number)
            self._check_slots()

    # --- the operator ------------------------------------------------------------------------------------------------

    def run_turn(self, _: int) -> None:
        before = self._coverage_by_model()
        seen = self.cluster.observe()
        self.past_observations = [*self.past_observations[-3:], seen]
        decision = self.cluster.run_turn(seen)
        self._check_coverage(before, decision)

    def pass_time(self, number: int) -> None:
        self.cluster.pass_time(1.0 + number % 4)

    def crash_in_turn(self, number: int) -> None:
        self.cluster.run_turn(max_actions=number % 7)

    def act_on_stale_swarm(self, number: int) -> None:
        """Run a turn of another operator on an older observation."""
        if self.past_observations:
            self.cluster.run_turn(self.past_observations[number % len(self.past_observations)])

    def act_on_stale_pods(self, number: int) -> None:
        """Run a turn on the current swarm and an older list of pods."""
        if self.past_observations:
            pods = self.past_observations[number % len(self.past_observations)].pods
            self.cluster.run_turn(replace(self.cluster.observe(), pods=pods))

    # --- pods --------------------------------------------------------------------------------------------------------

    def _pod(self, number: int) -> Pod | None:
        pods = sorted(self.cluster.pods.values(), key=lambda pod: pod.name)
        return pods[number % len(pods)] if pods else None

    def delete_pod(self, number: int) -> None:
        if pod := self._pod(number):
            self.cluster.delete_pod(pod.name)

    def force_delete_pod(self, number: int) -> None:
        if pod := self._pod(number):
            self.cluster.force_delete_pod(pod.name)

    def fail_pod(self, number: int) -> None:
        pod = self._pod(number)
        if pod and pod.view.deleting_since is None:
            self.cluster.fail_pod(pod.name)

    def preempt_pod(self, number: int) -> None:
        if pod := self._pod(number):
            self.cluster.set_pod(pod.name, disruption="PreemptionByScheduler")
            self.cluster.delete_pod(pod.name)

    def change_keep_annotation(self, number: int) -> None:
        if pod := self._pod(number):
            value = "true" if number % 3 else "false"
            self.cluster.set_pod(pod.name, annotations={**pod.view.annotations, names.KEEP: value})

    def edit_pod_label(self, number: int) -> None:
        if pod := self._pod(number):
            key = (names.ROLE, names.SLOT, names.SPAN, names.INCARNATION)[number % 4]
            self.cluster.set_pod(pod.name, labels={**pod.view.labels, key: "9"})

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, number: int) -> Node | None:
        nodes = sorted(self.cluster.nodes.values(), key=lambda node: node.name)
        return nodes[number % len(nodes)] if nodes else None

    def set_node_not_ready(self, number: int) -> None:
        if node := self._node(number):
            self.cluster.set_node_not_ready(node.name)

    def set_node_ready(self, number: int) -> None:
        if node := self._node(number):
            self.cluster.set_node_ready(node.name)

    def delete_node(self, number: int) -> None:
        if node := self._node(number):
            self.cluster.delete_node(node.name)

    def add_node(self, number: int) -> None:
        name = f"n{number % 6}"
        self.cluster.nodes.setdefault(name, Node(name, capacity=1 + number % 5))

    def cordon_node(self, number: int) -> None:
        if node := self._node(number):
            node.departing = "cordoned"

    def uncordon_node(self, number: int) -> None:
        if node := self._node(number):
            node.departing = ""

    # --- edits by users ----------------------------------------------------------------------------------------------

    def change_replicas(self, number: int) -> None:
        self.cluster.edit_spec(replicas=number % 4)

    def change_spans(self, number: int) -> None:
        self.cluster.edit_spec(spans={"count": 1 + number % 4})

    def change_served_name(self, number: int) -> None:
        self.cluster.edit_spec(
            model={"source": "demo://counting", "servedName": ("counting", "other")[number % 2]}
        )

    def change_model(self, number: int) -> None:
        source = ("demo://counting", "hf://org/one", "hf://org/two")[number % 3]
        self.cluster.edit_spec(model={"source": source})

    def fail_inspections(self, number: int) -> None:
        answer = (2, "it has no tokenizer") if number % 2 else (137, "")
        self.cluster.inspection_result = lambda pod: answer

    def change_pod_template(self, number: int) -> None:
        label = {"metadata": {"labels": {"team": f"t{number % 3}"}}}
        self.cluster.edit_spec(pools=[{"name": "only", "podTemplate": label}])

    def change_surge(self, number: int) -> None:
        self.cluster.edit_spec(rollout={"surge": number % 3})

    def change_pause(self, number: int) -> None:
        self.cluster.edit_spec(paused=number % 2 == 0)

    def change_quota(self, number: int) -> None:
        self.cluster.quota = None if number % 2 else number % 9

    def crash_containers(self, number: int) -> None:
        """Make the containers of no pod, of all later pods, or of odd incarnations crash."""
        changed_at = self.cluster.now
        rules: list[Callable[[Pod], bool]] = [
            lambda pod: False,
            lambda pod: pod.view.created >= changed_at,
            lambda pod: pod.view.labels[names.INCARNATION][-1] in "13579",
        ]
        self.cluster.is_crashing = rules[number % 3]

    def lose_status(self, number: int) -> None:
        """Replace the status, like a restored backup or an invalid write."""
        if number % 4 == 0:
            kept = {"incarnation": self.cluster.status.get("incarnation", 0)}
            self.cluster.status = {**kept, "conditions": "none"} if number % 8 else kept
            self.cluster.version += 1

    def delete_child(self, number: int) -> None:
        if self.cluster.children:
            self.cluster.children.pop(
                sorted(self.cluster.children)[number % len(self.cluster.children)]
            )

    # --- oracles -----------------------------------------------------------------------------------------------------

    def _check_slots(self) -> None:
        """Check that no two pods have the same incarnation, which is part of the name."""
        seen: dict[int, str] = {}
        for name in self.cluster.pods:
            incarnation = names.incarnation_of_name(name)
            assert seen.setdefault(incarnation, name) == name

    def _coverage_by_model(self) -> dict[str, int]:
        """Return the smallest number of servers of a block per model hash, without pods kept for debugging."""
        found: dict[str, list[int]] = {}
        for pod in self.cluster.pods.values():
            node = self.cluster.nodes.get(pod.view.node)
            kept = names.is_true(pod.view.annotations.get(names.KEEP))
            labelled_kept = pod.view.labels.get(names.ROLE) in (names.KEPT, names.INSPECT)
            if (
                pod.view.ready and pod.view.deleting_since is None and not pod.is_finished and not kept
                and not labelled_kept and node is not None and node.ready and not node.out_of_service
            ):  # fmt: skip
                generation = pod.view.annotations.get(names.MODEL_HASH, "")
                if not generation:
                    continue  # an inspection pod whose label was edited
                cover = found.setdefault(generation, [0] * 8)
                first, last = pod.view.annotations[names.BLOCKS].split(":")
                for block in range(int(first), int(last)):
                    cover[block] += 1
        return {generation: min(cover) for generation, cover in found.items()}

    def _check_coverage(self, before: dict[str, int], decision: Decision) -> None:
        """Check that a turn on current observations deleted no server that is needed."""
        if self.cluster.spec["replicas"] == 0:
            return
        most, left = (
            max(before.values(), default=0),
            max(self._coverage_by_model().values(), default=0),
        )
        assert left >= min(most, 1), [a for a in decision.actions if isinstance(a, DeletePod)]
        surge = self.cluster.spec.get("rollout", {}).get("surge", 1)
        waiting = any(pod.view.unschedulable for pod in self.cluster.pods.values())
        if len(before) == 1 and surge and not waiting:
            wanted = self.cluster.spec["replicas"]
            assert left >= min(most, wanted), [
                a for a in decision.actions if isinstance(a, DeletePod)
            ]

    # --- the end state -----------------------------------------------------------------------------------------------

    def end_faults(self) -> None:
        """End all faults; the last edits of the spec stay."""
        cluster = self.cluster
        for name in ("n0", "n1", "n2", "n3", "n4"):
            cluster.nodes.setdefault(name, Node(name))
        for node in cluster.nodes.values():
            node.ready, node.not_ready_since, node.departing, node.capacity = True, None, "", 8
        cluster.inspection_result = lambda pod: (0, inspect_demo_model())
        cluster.quota, cluster.is_crashing = None, lambda pod: False
        cluster.edit_spec(paused=False)
        for pod in cluster.pods.values():
            annotations = {k: v for k, v in pod.view.annotations.items() if k != names.KEEP}
            pod.view = replace(pod.view, annotations=annotations)

    def run_until_idle(self, max_rounds: int = 400) -> int:
        """Run turns until none is due; return the number of rounds."""
        cluster = self.cluster
        quiet = 0
        for number in range(max_rounds):
            decision = cluster.run_turn()
            quiet = 0 if decision.actions else quiet + 1
            if quiet > 6 and decision.requeue_at is None:
                return number
            ahead = (
                1.0
                if quiet <= 6 or decision.requeue_at is None
                else decision.requeue_at - cluster.now
            )
            cluster.pass_time(max(ahead, 0.5))
        raise AssertionError(
            f"not idle after {max_rounds} rounds: {cluster.log[-15:]} {cluster.pending_actions()}"
        )

    def check_end_state(self) -> None:
        """Check that pods, coverage and conditions match the spec."""
        cluster = self.cluster
        wanted: int = cluster.spec["replicas"]
        plan: dict[str, Any] = cluster.status["plan"]
        slots = sorted(pod.view.labels[names.SLOT] for pod in cluster.server_pods())
        assert len(slots) == len(set(slots)) == wanted * len(plan["spans"]), slots
        assert len(cluster.pods) == len(cluster.ready_pods()) == len(slots)
        blocks = {f"{span['first']}:{span['last']}" for span in plan["spans"]}
        assert {pod.view.annotations[names.BLOCKS] for pod in cluster.server_pods()} <= blocks
        assert cluster.coverage() == (wanted if wanted else 0)
        assert cluster.condition("Ready")["status"] == ("True" if wanted else "False")
        assert cluster.condition("Degraded")["status"] == "False", cluster.condition("Degraded")
        assert cluster.condition("Progressing")["status"] == "False", cluster.condition(
            "Progressing"
        )
        assert cluster.decide().actions == []
