"""The operator's decision: from observed state to actions. A pure function, called once per turn.

The same input and the same time give the same actions, and a swarm that matches its spec gives none. All memory between
turns is in status, so it does not matter which operator decides, or when an earlier one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from modelswarm.errors import UserError
from modelswarm.resources.spec import Spec
from modelswarm.resources.status import ModelStatus, PlanStatus, Status
from modelswarm_operator.reconcile import deletion
from modelswarm_operator.reconcile.inspection import end_inspections, inspect_swarm_model
from modelswarm_operator.reconcile.manifests.manifests import ManifestBuilder
from modelswarm_operator.reconcile.manifests.pod_builder import reserved_fields
from modelswarm_operator.reconcile.model.facts import known_model
from modelswarm_operator.reconcile.model.node_accelerators import (
    NodeAccelerators,
    find_accelerators,
)
from modelswarm_operator.reconcile.model.span_plan import Layout, make_layout
from modelswarm_operator.reconcile.pods.inventory import classify_pods
from modelswarm_operator.reconcile.serving_swarm import (
    ServingResult,
    reconcile_serving,
    suspend_servers,
)
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import Action, Decision, SetFinalizer, WriteStatus
from modelswarm_operator.reconcile.state.observed import Observed
from modelswarm_operator.reconcile.state.policy import Policy
from modelswarm_operator.reconcile.state.slot_history import read_status, slot_histories
from modelswarm_operator.reconcile.state.turn import Turn
from modelswarm_operator.reconcile.status.condition_rules import SwarmSummary, condition_updates
from modelswarm_operator.reconcile.status.conditions import (
    READY,
    ConditionUpdate,
    apply_updates,
    transition_events,
)
from modelswarm_operator.reconcile.status.memory_advice import MemoryAdvice
from modelswarm_operator.reconcile.status.pod_diagnosis import PodDiagnosis
from modelswarm_operator.reconcile.status.problems import Problem, shorten
from modelswarm_operator.reconcile.status.status import ReadyCounts, build_status, count_ready

MAX_LOST_INCARNATIONS = 1_000_000
"""A pod whose number is more than this above status is ignored when the next number is chosen: its name is forged."""

_NOT_SERVING = ServingResult((), (), 0, 0, 0)


@dataclass(slots=True)
class _Outcome:
    """The findings of a turn; its decisions are in `Turn`."""

    model: ModelStatus | None
    plan: PlanStatus | None
    model_hash: str = ""  # of the wanted servers; "": not known
    problems: list[Problem] = field(default_factory=list)
    serving: ServingResult = _NOT_SERVING
    is_held: bool = False
    is_inspecting: bool = False


def reconcile(observed: Observed, policy: Policy, now: float) -> Decision:
    return _Reconciliation(observed, policy, now).decide()


class _Reconciliation:
    def __init__(self, observed: Observed, policy: Policy, now: float) -> None:
        self.observed, self.policy, self.now = observed, policy, now
        self.swarm = observed.swarm
        self.stored: Status = read_status(self.swarm.status)
        self.inventory = classify_pods(observed.pods, observed.nodes, policy, now)
        self.builder = ManifestBuilder(self.swarm, policy)
        self.turn = self._start_turn()

    def _start_turn(self) -> Turn:
        requested = names.reconcile_request(self.swarm.annotations)
        slots = slot_histories(self.stored)
        spans = len(self.stored.plan.spans) if self.stored.plan else 1
        turn = Turn(
            policy=self.policy,
            now=self.now,
            slots=slots,
            incarnation=self._highest_incarnation(),
            seen_incarnations=self.inventory.incarnations,
            failure_budget=max(
                self.policy.min_budget, self.policy.budget_per_slot * spans * self._replicas
            ),
        )
        if (
            requested != self.stored.reconciled_at
        ):  # the user asks for a retry: no waiting, and a fresh budget
            turn.reset_failures()
        turn.requeue_at(self.inventory.next_change_at)
        return turn

    def _highest_incarnation(self) -> int:
        """Status is stored before a pod is created, so that a pod far above it was not created by an operator.

        Pods above status are known after a loss of status only.
        """
        stored = self.stored.incarnation
        seen = (one for one in self.inventory.incarnations if one <= stored + MAX_LOST_INCARNATIONS)
        return max((stored, *seen))

    @property
    def _replicas(self) -> int:
        if self.swarm.spec is not None:
            return self.swarm.spec.replicas
        return self.stored.spans[0].desired if self.stored.spans else 0

    @property
    def _names(self) -> tuple[str, ...]:
        """Return the served name and those of adapters; the former ones while the spec's cannot be had."""
        spec, stored = self.swarm.spec, self.stored
        if spec is None or self.observed.name_taken_by:
            return (stored.served_name, *stored.adapters)
        return spec.model.names(self.swarm.name)

    def decide(self) -> Decision:
        outcome = _Outcome(self.stored.model, self.stored.plan)
        spec = self.swarm.spec
        if self.swarm.is_deleting:
            return self._finish_deletion(outcome)
        if spec is None:
            self._hold(outcome, "InvalidSpec", self.swarm.spec_problem)
        elif not spec.paused:
            self._reconcile_spec(spec, outcome)
            if outcome.serving is _NOT_SERVING and spec.replicas == 0 and self.inventory.servers:
                outcome.serving = suspend_servers(
                    self.observed, self.builder, spec, self.inventory, self.turn
                )
        if spec is not None and outcome.serving is _NOT_SERVING:
            outcome.problems += self._diagnose(spec)
        return self._conclude(spec, outcome)

    def _diagnose(self, spec: Spec) -> list[Problem]:
        """Return the problems of servers that this turn leaves as they are."""
        plan, model = self.stored.plan, self.stored.model
        if plan is None or not plan.spans or model is None:
            return []
        max_length = spec.sessions.max_length or model.context or 1
        memory = MemoryAdvice.for_plan(spec, plan.spans, max_length)
        diagnosis = PodDiagnosis(self.turn, self.observed.nodes, memory)
        return diagnosis.diagnose_servers(self.inventory.servers)

    def _hold(self, outcome: _Outcome, reason: str, message: str) -> None:
        """Start and delete nothing but for 0 replicas: the pods are better than the result of such a spec."""
        outcome.is_held = True
        outcome.problems.append(Problem(reason, message))

    def _reconcile_spec(self, spec: Spec, outcome: _Outcome) -> None:
        if other := self.observed.name_taken_by:
            name = self.observed.taken_name
            is_adapter = name in spec.model.names(self.swarm.name)[1:]
            field = "name in spec.model.adapters" if is_adapter else "spec.model.servedName"
            message = f"The model name {name!r} is served by ModelSwarm {other} already"
            self._hold(outcome, "ServedNameTaken", f"{message}; give this one another {field}.")
            return
        try:
            known = self._find_model(spec, outcome)
            if known is None:
                return
            outcome.model = (
                known  # also if the plan is refused: else the model would be inspected for ever
            )
            layout = make_layout(
                self.swarm.name, spec, known, self.stored.plan, self._accelerators(spec)
            )
            ignored = reserved_fields(self.builder, spec, layout)
        except UserError as error:
            self._hold(outcome, "InvalidSpec", str(error))
            return
        if ignored:
            message = (
                f"These fields are the operator's and stay as it sets them: {', '.join(ignored)}."
            )
            outcome.problems.append(Problem("PodTemplateReserved", message))
        self._record_plan(layout)
        outcome.plan, outcome.model_hash = layout.plan, layout.model_hash
        outcome.serving = reconcile_serving(
            self.observed, self.builder, spec, layout, self.inventory, self.turn
        )
        outcome.problems += outcome.serving.problems

    def _accelerators(self, spec: Spec) -> NodeAccelerators:
        return find_accelerators(spec.pools, self.observed.nodes, self.policy.pod_template)

    def _find_model(self, spec: Spec, outcome: _Outcome) -> ModelStatus | None:
        """Return None while an inspection runs, and for a suspended swarm, which has no pod at all."""
        known = known_model(spec.model, self.stored.model)
        if known is not None or spec.replicas == 0:
            end_inspections(self.inventory, self.turn)
            return known
        result = inspect_swarm_model(self.observed, self.builder, spec, self.inventory, self.turn)
        outcome.problems += result.problems
        outcome.is_inspecting = result.model is None
        return result.model

    def _record_plan(self, layout: Layout) -> None:
        if self.stored.plan is None or self.stored.plan.hash != layout.plan.hash:
            spans = " ".join(layout.blocks[:16]) + (" …" if len(layout.blocks) > 16 else "")
            self.turn.record_event(
                "Normal", "Planned", f"{len(layout.blocks)} spans in {layout.dtype}: {spans}"
            )

    def _finish_deletion(self, outcome: _Outcome) -> Decision:
        may_go = deletion.delete_pods(self.swarm, self.inventory, self.turn)
        ready_counts = self._count_ready(outcome)
        updates = deletion.condition_updates(self.swarm, self.inventory, ready_counts)
        last: list[Action] = []
        if may_go and names.FINALIZER in self.swarm.finalizers:
            last.append(SetFinalizer(False))
        return self._decision(outcome, ready_counts, updates, [], last)

    def _conclude(self, spec: Spec | None, outcome: _Outcome) -> Decision:
        ready_counts = self._count_ready(outcome)
        serving = outcome.serving
        situation = SwarmSummary(
            ready_counts=ready_counts,
            problems=outcome.problems,
            is_paused=spec is not None and spec.paused,
            is_suspended=spec is not None and spec.replicas == 0,
            is_held=outcome.is_held,
            is_inspecting=outcome.is_inspecting,
            from_older_plan=serving.from_older_plan,
            outdated=serving.outdated,
            surplus=serving.surplus,
            starts=self._describe_starts(),
            chat_warning=self._chat_warning(spec, outcome.model),
        )
        first: list[Action] = []
        if names.FINALIZER not in self.swarm.finalizers:
            first.append(SetFinalizer(True))
        updates = condition_updates(situation, self.stored.conditions)
        return self._decision(outcome, ready_counts, updates, first, serving.children)

    def _describe_starts(self) -> list[str]:
        """Return what the starts of servers wait for, as those servers have told."""
        words = self.observed.start_progress
        return [
            f"{one.pod.name}: {words[one.pod.uid]}"
            for one in self.inventory.servers
            if one.is_alive and not one.pod.ready and one.pod.uid in words
        ]

    def _chat_warning(self, spec: Spec | None, model: ModelStatus | None) -> str:
        """Return why chats are refused, "" if they are not; with an Event when that is new."""
        if model is None or not model.warnings or spec is None or spec.model.chat_template:
            return ""
        warning = shorten(" ".join(model.warnings))
        ready = next((one for one in self.stored.conditions if one.type == READY), None)
        if ready is None or warning not in ready.message:
            self.turn.record_event("Warning", "ChatUnavailable", warning)
        return warning

    def _count_ready(self, outcome: _Outcome) -> ReadyCounts:
        return count_ready(
            self.inventory.servers, outcome.plan, outcome.model_hash, self._replicas, self.turn
        )

    def _decision(
        self,
        outcome: _Outcome,
        ready_counts: ReadyCounts,
        updates: list[ConditionUpdate],
        first: Sequence[Action],
        last: Sequence[Action],
    ) -> Decision:
        turn, before = self.turn, self.stored.conditions
        conditions = apply_updates(updates, before, self.swarm.generation, self.now)
        status = build_status(
            self.swarm,
            self.policy.gateway_url,
            ready_counts,
            conditions,
            turn,
            outcome.model,
            outcome.plan,
            self._names,
        ).to_json()
        actions: list[Action] = []
        if status != self.swarm.status:
            actions.append(WriteStatus(status))
        # Creates first: a label or a Service that a webhook rejects must not delay a replacement.
        actions += [*first, *turn.creates, *turn.deletes.values(), *turn.labels, *last]
        actions += [*transition_events(updates, before), *turn.events()]
        wake_at = turn.next_requeue
        return Decision(actions, wake_at if wake_at is not None and wake_at > self.now else None)
