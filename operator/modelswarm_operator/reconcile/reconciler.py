"""The operator's decision: from what is observed to what is done about it. A pure function, called once per turn.

The same world and the same time give the same actions, and a world that is as it should be gives none. Nothing is
remembered between turns but what is in status, so it does not matter which operator decides, or when it died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from modelswarm.errors import UserError
from modelswarm.resources.spec import Spec
from modelswarm.resources.status import ModelStatus, PlanStatus, Status
from modelswarm_operator.reconcile import deletion
from modelswarm_operator.reconcile.inspection import dismiss, find_out
from modelswarm_operator.reconcile.manifests.manifests import Maker
from modelswarm_operator.reconcile.manifests.pod_builder import reserved_fields
from modelswarm_operator.reconcile.model.facts import known_model
from modelswarm_operator.reconcile.model.span_plan import Layout, lay_out
from modelswarm_operator.reconcile.pods.inventory import classify_pods
from modelswarm_operator.reconcile.serving_swarm import Upkeep, keep_up
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import (
    Action,
    Decision,
    Observed,
    SetFinalizer,
    WriteStatus,
)
from modelswarm_operator.reconcile.state.policy import Policy
from modelswarm_operator.reconcile.state.slot_history import read_status, slots_of
from modelswarm_operator.reconcile.state.turn import Turn
from modelswarm_operator.reconcile.status.condition_rules import Situation, verdicts_of
from modelswarm_operator.reconcile.status.conditions import Verdict, conditions_of, transitions
from modelswarm_operator.reconcile.status.problems import Problem
from modelswarm_operator.reconcile.status.status import Tally, status_of, tally_of

_NOTHING = Upkeep((), (), 0, 0, 0)


@dataclass(slots=True)
class _Outcome:
    """What a turn found out, beside what it wrote into the ledger."""

    model: ModelStatus | None
    plan: PlanStatus | None
    generation: str = ""  # of the servers that are wanted; "": not known
    problems: list[Problem] = field(default_factory=list)
    upkeep: Upkeep = _NOTHING
    held: bool = False
    inspecting: bool = False


def reconcile(observed: Observed, policy: Policy, now: float) -> Decision:
    return _Reconciliation(observed, policy, now).decide()


class _Reconciliation:
    def __init__(self, observed: Observed, policy: Policy, now: float) -> None:
        self.observed, self.policy, self.now = observed, policy, now
        self.swarm = observed.swarm
        self.stored: Status = read_status(self.swarm.status)
        self.fleet = classify_pods(observed.pods, observed.nodes, policy, now)
        self.maker = Maker(self.swarm, policy)
        self.ledger = self._ledger()

    def _ledger(self) -> Turn:
        asked = names.asked_at(self.swarm.annotations)
        slots = slots_of(self.stored)
        spans = len(self.stored.plan.spans) if self.stored.plan else 1
        ledger = Turn(
            policy=self.policy,
            now=self.now,
            slots=slots,
            incarnation=max((self.stored.incarnation, *self.fleet.incarnations)),
            seen_incarnations=self.fleet.incarnations,
            failure_budget=max(
                self.policy.budget_least, self.policy.budget_per_slot * spans * self._replicas
            ),
        )
        if asked != self.stored.reconciled_at:  # a person asks: no waiting, and a fresh budget
            ledger.reset_failures()
        ledger.requeue_at(self.fleet.next_change_at)
        return ledger

    @property
    def _replicas(self) -> int:
        if self.swarm.spec is not None:
            return self.swarm.spec.replicas
        return self.stored.spans[0].desired if self.stored.spans else 0

    @property
    def _served_name(self) -> str:
        """What it has: while another swarm has the name that it asks for, the one it had before."""
        if self.observed.served_name_taken_by:
            return self.stored.served_name
        asked = self.swarm.spec.model.served_name if self.swarm.spec is not None else None
        return asked or self.swarm.name

    def decide(self) -> Decision:
        outcome = _Outcome(self.stored.model, self.stored.plan)
        spec = self.swarm.spec
        if self.swarm.deleting:
            return self._let_go(outcome)
        if spec is None:
            self._hold(outcome, "InvalidSpec", self.swarm.spec_problem)
        elif not spec.paused:
            self._pursue(spec, outcome)
        return self._conclude(spec, outcome)

    def _hold(self, outcome: _Outcome, reason: str, message: str) -> None:
        """Nothing is started or ended: what runs is better than what such a spec would make of it."""
        outcome.held = True
        outcome.problems.append(Problem(reason, message))

    def _pursue(self, spec: Spec, outcome: _Outcome) -> None:
        if other := self.observed.served_name_taken_by:
            served = spec.model.served_name or self.swarm.name
            said = f"The model name {served!r} is served by ModelSwarm {other} already; give this one another"
            self._hold(outcome, "ServedNameTaken", f"{said} spec.model.servedName.")
            return
        try:
            known = self._model(spec, outcome)
            if known is None:
                return
            layout = lay_out(self.swarm.name, spec, known, self.stored.plan)
            ignored = reserved_fields(self.maker, spec, layout)
        except UserError as error:
            self._hold(outcome, "InvalidSpec", str(error))
            return
        if ignored:
            said = (
                f"These fields are the operator's and stay as it sets them: {', '.join(ignored)}."
            )
            outcome.problems.append(Problem("PodTemplateReserved", said))
        self._tell_plan(layout)
        outcome.model, outcome.plan, outcome.generation = known, layout.status, layout.generation
        outcome.upkeep = keep_up(self.observed, self.maker, spec, layout, self.fleet, self.ledger)
        outcome.problems += outcome.upkeep.problems

    def _model(self, spec: Spec, outcome: _Outcome) -> ModelStatus | None:
        """None: an inspection is on its way."""
        known = known_model(spec.model, self.stored.model)
        if known is not None:
            dismiss(self.fleet, self.ledger)
            return known
        finding = find_out(self.observed, self.maker, spec, self.fleet, self.ledger)
        outcome.problems += finding.problems
        outcome.inspecting = finding.known is None
        return finding.known

    def _tell_plan(self, layout: Layout) -> None:
        if self.stored.plan is None or self.stored.plan.hash != layout.hash:
            spans = " ".join(layout.blocks[:16]) + (" …" if len(layout.blocks) > 16 else "")
            self.ledger.record_event("Normal", "Planned", f"{len(layout.blocks)} spans: {spans}")

    def _let_go(self, outcome: _Outcome) -> Decision:
        may_go = deletion.end_pods(self.swarm, self.fleet, self.ledger)
        tally = self._tally(outcome)
        verdicts = deletion.verdicts(self.swarm, self.fleet, tally)
        last: list[Action] = []
        if may_go and names.FINALIZER in self.swarm.finalizers:
            last.append(SetFinalizer(False))
        return self._decision(outcome, tally, verdicts, [], last)

    def _conclude(self, spec: Spec | None, outcome: _Outcome) -> Decision:
        tally = self._tally(outcome)
        upkeep = outcome.upkeep
        situation = Situation(
            tally=tally,
            problems=outcome.problems,
            paused=spec is not None and spec.paused,
            suspended=spec is not None and spec.replicas == 0,
            held=outcome.held,
            inspecting=outcome.inspecting,
            foreign=upkeep.foreign,
            outdated=upkeep.outdated,
            surplus=upkeep.surplus,
        )
        first: list[Action] = []
        if names.FINALIZER not in self.swarm.finalizers:
            first.append(SetFinalizer(True))
        verdicts = verdicts_of(situation, self.stored.conditions)
        return self._decision(outcome, tally, verdicts, first, upkeep.children)

    def _tally(self, outcome: _Outcome) -> Tally:
        return tally_of(
            self.fleet.servers, outcome.plan, outcome.generation, self._replicas, self.ledger
        )

    def _decision(self, outcome: _Outcome, tally: Tally, verdicts: list[Verdict], first: Sequence[Action],
                  last: Sequence[Action]) -> Decision:  # fmt: skip
        ledger, before = self.ledger, self.stored.conditions
        conditions = conditions_of(verdicts, before, self.swarm.generation, self.now)
        status = status_of(
            self.swarm,
            self.policy.gateway_url,
            tally,
            conditions,
            ledger,
            outcome.model,
            outcome.plan,
            self._served_name,
        ).document()
        actions: list[Action] = []
        if status != self.swarm.status:
            actions.append(WriteStatus(status))
        # Creates first: a label or a Service that some webhook does not let through must not hold up a replacement.
        actions += [*first, *ledger.creates, *ledger.deletes.values(), *ledger.labels, *last]
        actions += [*transitions(verdicts, before), *ledger.events()]
        wake_at = ledger.next_requeue
        return Decision(actions, wake_at if wake_at is not None and wake_at > self.now else None)
