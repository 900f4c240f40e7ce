"""Faults, edits and crashes of the operator, drawn at random over a model cluster, with oracles after every step.

Used by the property tests; a run is a list of small numbers, so that hypothesis can shrink it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from support.operator.model_cluster import Node, Pod, World, demo_facts

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import Decision, DeletePod
from modelswarm_operator.reconcile.state.observed import Observed

Step = tuple[int, int]  # which fault, and a number it makes of what it likes


class Storm:
    """Applies steps to a world and checks what must hold whatever happens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.old: list[Observed] = []  # what a slow operator may still act on
        self.steps = 0
        self.faults: list[Callable[[int], None]] = [
            self.look, self.look, self.look, self.wait, self.wait, self.die_in_a_turn,
            self.late_operator, self.stale_pods, self.kill, self.vanish, self.fail, self.preempt,
            self.node_down, self.node_up, self.node_gone, self.node_new, self.cordon, self.uncordon,
            self.scale, self.respan, self.rename, self.repatch, self.surge, self.pause, self.quota, self.poison,
            self.keep, self.unlabel, self.forget_status, self.lose_child,
            self.remodel, self.refuse_models,
        ]  # fmt: skip

    def run(self, steps: Sequence[Step]) -> None:
        for which, number in steps:
            self.faults[which % len(self.faults)](number)
            self.steps += 1
            self._check_slots()

    # --- the operator ----------------------------------------------------------------------------------------------

    def look(self, _: int) -> None:
        before = self._cover()
        seen = self.world.observe()
        self.old = [*self.old[-3:], seen]
        decision = self.world.turn(seen)
        self._check_cover(before, decision)

    def wait(self, number: int) -> None:
        self.world.pass_time(1.0 + number % 4)

    def die_in_a_turn(self, number: int) -> None:
        self.world.turn(most=number % 7)

    def late_operator(self, number: int) -> None:
        """Another operator decided by what it saw a while ago."""
        if self.old:
            self.world.turn(self.old[number % len(self.old)])

    def stale_pods(self, number: int) -> None:
        if self.old:
            pods = self.old[number % len(self.old)].pods
            self.world.turn(replace(self.world.observe(), pods=pods))

    # --- pods ------------------------------------------------------------------------------------------------------

    def _pod(self, number: int) -> Pod | None:
        pods = sorted(self.world.pods.values(), key=lambda pod: pod.name)
        return pods[number % len(pods)] if pods else None

    def kill(self, number: int) -> None:
        if pod := self._pod(number):
            self.world.kill(pod.name)

    def vanish(self, number: int) -> None:
        if pod := self._pod(number):
            self.world.vanish(pod.name)

    def fail(self, number: int) -> None:
        pod = self._pod(number)
        if pod and pod.view.deleting_since is None:
            self.world.fail(pod.name)

    def preempt(self, number: int) -> None:
        if pod := self._pod(number):
            self.world.set_pod(pod.name, disruption="PreemptionByScheduler")
            self.world.kill(pod.name)

    def keep(self, number: int) -> None:
        if pod := self._pod(number):
            value = "true" if number % 3 else "false"
            self.world.set_pod(pod.name, annotations={**pod.view.annotations, names.KEEP: value})

    def unlabel(self, number: int) -> None:
        if pod := self._pod(number):
            key = (names.ROLE, names.SLOT, names.SPAN, names.INCARNATION)[number % 4]
            self.world.set_pod(pod.name, labels={**pod.view.labels, key: "9"})

    # --- nodes -----------------------------------------------------------------------------------------------------

    def _node(self, number: int) -> Node | None:
        nodes = sorted(self.world.nodes.values(), key=lambda node: node.name)
        return nodes[number % len(nodes)] if nodes else None

    def node_down(self, number: int) -> None:
        if node := self._node(number):
            self.world.node_down(node.name)

    def node_up(self, number: int) -> None:
        if node := self._node(number):
            self.world.node_up(node.name)

    def node_gone(self, number: int) -> None:
        if node := self._node(number):
            self.world.node_gone(node.name)

    def node_new(self, number: int) -> None:
        name = f"n{number % 6}"
        self.world.nodes.setdefault(name, Node(name, room=1 + number % 5))

    def cordon(self, number: int) -> None:
        if node := self._node(number):
            node.departing = "cordoned"

    def uncordon(self, number: int) -> None:
        if node := self._node(number):
            node.departing = ""

    # --- people ----------------------------------------------------------------------------------------------------

    def scale(self, number: int) -> None:
        self.world.edit(replicas=number % 4)

    def respan(self, number: int) -> None:
        self.world.edit(spans={"count": 1 + number % 4})

    def rename(self, number: int) -> None:
        self.world.edit(
            model={"source": "demo://counting", "servedName": ("counting", "other")[number % 2]}
        )

    def remodel(self, number: int) -> None:
        source = ("demo://counting", "hf://org/one", "hf://org/two")[number % 3]
        self.world.edit(model={"source": source})

    def refuse_models(self, number: int) -> None:
        answer = (2, "it has no tokenizer") if number % 2 else (137, "")
        self.world.inspected = lambda pod: answer

    def repatch(self, number: int) -> None:
        label = {"metadata": {"labels": {"team": f"t{number % 3}"}}}
        self.world.edit(pools=[{"name": "only", "podTemplate": label}])

    def surge(self, number: int) -> None:
        self.world.edit(rollout={"surge": number % 3})

    def pause(self, number: int) -> None:
        self.world.edit(paused=number % 2 == 0)

    def quota(self, number: int) -> None:
        self.world.quota = None if number % 2 else number % 9

    def poison(self, number: int) -> None:
        """Containers of every pod, or of those to come, only crash; or none do."""
        born = self.world.now
        rules: list[Callable[[Pod], bool]] = [
            lambda pod: False,
            lambda pod: pod.view.created >= born,
            lambda pod: pod.view.labels[names.INCARNATION][-1] in "13579",
        ]
        self.world.poison = rules[number % 3]

    def forget_status(self, number: int) -> None:
        """Restored from a backup without status; or somebody wrote nonsense."""
        if number % 4 == 0:
            kept = {"incarnation": self.world.status.get("incarnation", 0)}
            self.world.status = {**kept, "conditions": "none"} if number % 8 else kept
            self.world.version += 1

    def lose_child(self, number: int) -> None:
        if self.world.children:
            self.world.children.pop(sorted(self.world.children)[number % len(self.world.children)])

    # --- oracles ---------------------------------------------------------------------------------------------------

    def _check_slots(self) -> None:
        """Never two pods of one incarnation; what a pod is called says which it is."""
        seen: dict[int, str] = {}
        for name in self.world.pods:
            incarnation = names.incarnation_of_name(name)
            assert seen.setdefault(incarnation, name) == name

    def _cover(self) -> dict[str, int]:
        """Per generation: the fewest servers of a block. What somebody takes out to look at does not count."""
        found: dict[str, list[int]] = {}
        for pod in self.world.pods.values():
            node = self.world.nodes.get(pod.view.node)
            kept = names.is_true(pod.view.annotations.get(names.KEEP))
            labelled_kept = pod.view.labels.get(names.ROLE) in (names.KEPT, names.INSPECT)
            if (
                pod.view.ready and pod.view.deleting_since is None and not pod.over and not kept
                and not labelled_kept and node is not None and node.ready and not node.out_of_service
            ):  # fmt: skip
                generation = pod.view.annotations.get(names.MODEL_HASH, "")
                if not generation:
                    continue  # an inspection whose label somebody changed
                cover = found.setdefault(generation, [0] * 8)
                first, last = pod.view.annotations[names.BLOCKS].split(":")
                for block in range(int(first), int(last)):
                    cover[block] += 1
        return {generation: min(cover) for generation, cover in found.items()}

    def _check_cover(self, before: dict[str, int], decision: Decision) -> None:
        """A turn that saw the truth ends no server that is needed."""
        if self.world.spec["replicas"] == 0:
            return
        most, left = max(before.values(), default=0), max(self._cover().values(), default=0)
        assert left >= min(most, 1), [a for a in decision.actions if isinstance(a, DeletePod)]
        surge = self.world.spec.get("rollout", {}).get("surge", 1)
        waiting = any(pod.view.unschedulable for pod in self.world.pods.values())
        if len(before) == 1 and surge and not waiting:
            wanted = self.world.spec["replicas"]
            assert left >= min(most, wanted), [
                a for a in decision.actions if isinstance(a, DeletePod)
            ]

    # --- the end ---------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """The faults end; what people asked for last stays."""
        world = self.world
        for name in ("n0", "n1", "n2", "n3", "n4"):
            world.nodes.setdefault(name, Node(name))
        for node in world.nodes.values():
            node.ready, node.not_ready_since, node.departing, node.room = True, None, "", 8
        world.inspected = lambda pod: (0, demo_facts())
        world.quota, world.poison = None, lambda pod: False
        world.edit(paused=False)
        for pod in world.pods.values():
            annotations = {k: v for k, v in pod.view.annotations.items() if k != names.KEEP}
            pod.view = replace(pod.view, annotations=annotations)

    def converge(self, most: int = 400) -> int:
        """Rounds until nothing is left to do, also not later."""
        world = self.world
        quiet = 0
        for number in range(most):
            decision = world.turn()
            quiet = 0 if decision.actions else quiet + 1
            if quiet > 6 and decision.requeue_at is None:
                return number
            ahead = (
                1.0
                if quiet <= 6 or decision.requeue_at is None
                else decision.requeue_at - world.now
            )
            world.pass_time(max(ahead, 0.5))
        raise AssertionError(f"no end after {most} rounds: {world.log[-15:]} {world.todo()}")

    def check_end(self) -> None:
        world = self.world
        wanted: int = world.spec["replicas"]
        plan: dict[str, Any] = world.status["plan"]
        slots = sorted(pod.view.labels[names.SLOT] for pod in world.servers())
        assert len(slots) == len(set(slots)) == wanted * len(plan["spans"]), slots
        assert len(world.pods) == len(world.ready()) == len(slots)
        blocks = {f"{span['first']}:{span['last']}" for span in plan["spans"]}
        assert {pod.view.annotations[names.BLOCKS] for pod in world.servers()} <= blocks
        assert world.coverage() == (wanted if wanted else 0)
        assert world.condition("Ready")["status"] == ("True" if wanted else "False")
        assert world.condition("Degraded")["status"] == "False", world.condition("Degraded")
        assert world.condition("Progressing")["status"] == "False", world.condition("Progressing")
        assert world.decide().actions == []
