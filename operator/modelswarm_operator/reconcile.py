"""The operator's decision: from what is observed to what is done about it. A pure function, called once per turn.

The same world and the same time give the same actions, and a world that is as it should be gives none. Nothing is
remembered between turns but what is in status, so that it does not matter which operator decides, or when it died.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from modelswarm.errors import UserError
from modelswarm.resources import Pool, Spec
from modelswarm.resources_status import ModelStatus, PlanStatus, Status
from modelswarm_operator import deletion, names
from modelswarm_operator.children import child_actions
from modelswarm_operator.conditions import Verdict, conditions_of, transitions
from modelswarm_operator.facts import known_model
from modelswarm_operator.fleet import Fleet, Ground, Server, muster
from modelswarm_operator.inspection import dismiss, find_out
from modelswarm_operator.keeper import Keeper, choose, rank, states_of
from modelswarm_operator.layout import Layout, lay_out
from modelswarm_operator.ledger import Ledger
from modelswarm_operator.manifests import Maker, drain_seconds, server_pod
from modelswarm_operator.memory import read_status, slots_of
from modelswarm_operator.names import SlotKey
from modelswarm_operator.planner import (
    Retirement,
    cover_of,
    retire_beside,
    retire_foreign,
    retire_unwanted,
    startable,
    to_renew,
)
from modelswarm_operator.policy import Policy
from modelswarm_operator.problems import Problem, node_problems, pod_problems, stuck_at
from modelswarm_operator.slots import SlotState
from modelswarm_operator.status import status_of, tally_of
from modelswarm_operator.template import patched, patches_of
from modelswarm_operator.verdicts import Situation, verdicts_of
from modelswarm_operator.world import (
    Action,
    ApplyChild,
    Decision,
    DeleteChild,
    Json,
    LabelPod,
    Observed,
    SetFinalizer,
    WriteStatus,
)


@dataclass(slots=True)
class _Outcome:
    """What a turn found out, beside what it wrote into the ledger."""

    model: ModelStatus | None
    plan: PlanStatus | None
    problems: list[Problem] = field(default_factory=list)
    children: list[ApplyChild | DeleteChild] = field(default_factory=list)
    held: bool = False
    inspecting: bool = False
    foreign: int = 0
    outdated: int = 0
    surplus: int = 0


def reconcile(observed: Observed, policy: Policy, now: float) -> Decision:
    return _Turn(observed, policy, now).decide()


class _Turn:
    def __init__(self, observed: Observed, policy: Policy, now: float) -> None:
        self.observed, self.policy, self.now = observed, policy, now
        self.swarm = observed.swarm
        self.stored: Status = read_status(self.swarm.status)
        self.fleet: Fleet = muster(observed.pods, observed.nodes, policy, now)
        spans = len(self.stored.plan.spans) if self.stored.plan else 1
        replicas = self.swarm.spec.replicas if self.swarm.spec else 0
        self.ledger = Ledger(
            policy=policy,
            now=now,
            slots=slots_of(self.stored),
            incarnation=max((self.stored.incarnation, *self.fleet.incarnations)),
            seen=self.fleet.incarnations,
            budget=max(policy.budget_least, policy.budget_per_slot * spans * replicas),
        )
        self.ledger.look_at(self.fleet.wake_at)
        self.maker = Maker(self.swarm, policy)

    def decide(self) -> Decision:
        if self.swarm.deleting:
            return self._let_go()
        outcome = _Outcome(self.stored.model, self.stored.plan)
        spec = self.swarm.spec
        if spec is None:
            self._hold(outcome, "InvalidSpec", self.swarm.spec_problem)
        elif not spec.paused:
            self._pursue(spec, outcome)
        return self._conclude(spec, outcome)

    def _hold(self, outcome: _Outcome, reason: str, message: str) -> None:
        outcome.held = True
        outcome.problems.append(Problem(reason, message))

    def _pursue(self, spec: Spec, outcome: _Outcome) -> None:
        if other := self.observed.served_name_taken_by:
            served = spec.model.served_name or self.swarm.name
            self._hold(
                outcome,
                "ServedNameTaken",
                f"The model name {served!r} is already served by ModelSwarm {other}; give this one another "
                "spec.model.servedName.",
            )
            return
        try:
            known = known_model(spec.model, self.stored.model)
            if known is None:
                known = self._inspect(spec, outcome)
                if known is None:
                    return
            else:
                dismiss(self.fleet, self.ledger)
            layout = lay_out(self.swarm.name, spec, known, self.stored.plan)
            outcome.problems += self._reserved_fields(spec, layout)
        except UserError as error:
            self._hold(outcome, "InvalidSpec", str(error))
            return
        outcome.model, outcome.plan = known, layout.status
        self._keep(spec, layout, outcome)

    def _inspect(self, spec: Spec, outcome: _Outcome) -> ModelStatus | None:
        refused = next((why for slot, why in self.observed.rejected.items()
                        if slot.startswith(names.INSPECT_SLOT)), "")  # fmt: skip
        finding = find_out(self.maker, spec, self.fleet, self.ledger, refused)
        outcome.problems += finding.problems
        if refused and finding.known is None:
            outcome.problems.append(_refusal("The inspection's pod", refused))
        outcome.inspecting = finding.known is None
        return finding.known

    def _reserved_fields(self, spec: Spec, layout: Layout) -> list[Problem]:
        """Made once without being used: what a patch may not change is told even while no pod is created."""
        ignored: list[str] = []
        for pool in layout.pools:
            patches = patches_of(spec, pool, self.policy.pod_template)
            if any(patch for _, patch in patches):
                pod = server_pod(self.maker, spec, layout, SlotKey(0, 0), pool, 1)
                ignored += patched(pod, patches)[1]
        if not ignored:
            return []
        shown = ", ".join(dict.fromkeys(ignored))
        said = f"These fields belong to the operator and are left as it sets them: {shown}."
        return [Problem("PodTemplateReserved", said)]

    def _keep(self, spec: Spec, layout: Layout, outcome: _Outcome) -> None:
        fleet, ledger, policy = self.fleet, self.ledger, self.policy
        for server in fleet.servers:
            if server.ground is Ground.GONE:
                ledger.delete(server.pod, "its node is gone", 0)
        for pod in fleet.strays:
            ledger.delete(pod, "it fills no slot")
        for pod, right in fleet.mislabelled:
            ledger.labels.append(LabelPod(pod.name, pod.uid, right))
        ranks = rank(fleet.servers, layout)
        wanted = startable(spec, ranks, len(layout.spans))
        states = states_of(ranks, ledger.slots, layout, policy)
        chosen = [choose(i, found, wanted, spec.replicas) for i, found in enumerate(states)]
        names_of_chosen = {str(state.key) for span in chosen for state in span}
        for slot in [one for one in ledger.slots if names.parse_slot(one) is not None]:
            if slot not in names_of_chosen:
                ledger.slots.pop(slot)
        make = _PodMaker(self.maker, spec, layout, self.fleet)
        keeper = Keeper(ledger, self.observed.rejected, make)
        renewals = [to_renew(span, spec, ledger) for span in chosen]
        for span, renew in zip(chosen, renewals, strict=True):
            keeper.keep(span, renew)
        unwanted = [
            server
            for key, found in ranks.slots.items()
            if str(key) not in names_of_chosen
            for server in found
        ]
        self._retire(spec, layout, chosen, unwanted, ranks.foreign)
        outcome.children = child_actions(
            self.maker, self.observed.children, len(layout.spans), spec.replicas
        )
        outcome.foreign = len(ranks.foreign)
        outcome.outdated = sum(len(state.outdated) for span in chosen for state in span)
        outcome.surplus = sum(one.leaving for one in fleet.servers) + len(unwanted)
        outcome.problems += self._problems(spec, layout, chosen)

    def _retire(self, spec: Spec, layout: Layout, chosen: Sequence[Sequence[SlotState]],
                unwanted: Sequence[Server], foreign: Sequence[Server]) -> None:  # fmt: skip
        blocks = layout.spans[-1].last
        today = [one for one in self.fleet.servers if one.generation == layout.generation]
        covered = min(cover_of(today, blocks)) > 0 or spec.replicas == 0
        retirement = Retirement(self.fleet.servers, blocks, self.ledger, drain_seconds(spec))
        for span in chosen:
            retire_beside(span, spec, retirement, self.ledger)
        retire_unwanted(unwanted, spec, retirement)
        retire_foreign(foreign, spec, retirement, layout.generation, covered)

    def _problems(
        self, spec: Spec, layout: Layout, chosen: Sequence[Sequence[SlotState]]
    ) -> list[Problem]:
        limits = {
            pool.name: str(pool.resources.limits["memory"])
            for pool in layout.pools
            if "memory" in pool.resources.limits
        }
        fleet, ledger = self.fleet, self.ledger
        found = pod_problems(
            (one for one in fleet.servers if one.pod.name not in ledger.deletes), limits
        )
        drain = float(drain_seconds(spec))
        found += node_problems(fleet.servers, fleet.mass, self.policy, self.now, drain)
        ledger.look_at(_later(stuck_at(fleet.servers, self.policy, drain), self.now))
        found += self._waiting(chosen)
        if ledger.budget_spent:
            found.append(
                Problem(
                    "RestartBudgetUsedUp",
                    f"{ledger.failures} servers failed, which is more than what is replaced quickly; each further "
                    f"one waits {self.policy.backoff_limit:.0f} s. Last: {_last_failure(ledger)}",
                )
            )
        return found

    def _waiting(self, chosen: Sequence[Sequence[SlotState]]) -> list[Problem]:
        found = []
        for state in (state for span in chosen for state in span):
            slot = str(state.key)
            memory = self.ledger.memory(slot)
            if state.settled is not None or state.hope is not None:
                continue
            if refused := self.observed.rejected.get(slot, ""):
                found.append(_refusal(f"The pod of slot {slot}", refused))
            elif memory.failures:
                said = f"Slot {slot} failed {memory.failures} times; last: {memory.last_failure}"
                found.append(Problem("ServersFailing", said, slot))
        return found

    def _let_go(self) -> Decision:
        outcome = _Outcome(self.stored.model, self.stored.plan)
        may_go = deletion.end_pods(self.swarm, self.fleet, self.ledger)
        replicas = self.swarm.spec.replicas if self.swarm.spec else 0
        tally = tally_of(self.fleet.servers, outcome.plan, replicas, self.ledger)
        verdicts = deletion.verdicts(self.swarm, self.fleet, tally)
        finalizer: list[Action] = []
        if may_go and names.FINALIZER in self.swarm.finalizers:
            finalizer.append(SetFinalizer(False))
        return self._decision(verdicts, tally_args=(outcome, replicas), before=[], after=finalizer)

    def _conclude(self, spec: Spec | None, outcome: _Outcome) -> Decision:
        replicas = spec.replicas if spec is not None else 0
        tally = tally_of(self.fleet.servers, outcome.plan, replicas, self.ledger)
        situation = Situation(
            tally=tally,
            problems=outcome.problems,
            paused=spec is not None and spec.paused,
            suspended=spec is not None and spec.replicas == 0,
            held=outcome.held,
            inspecting=outcome.inspecting,
            foreign=outcome.foreign,
            outdated=outcome.outdated,
            surplus=outcome.surplus,
        )
        verdicts = verdicts_of(situation, self.stored.conditions)
        before: list[Action] = []
        if names.FINALIZER not in self.swarm.finalizers:
            before.append(SetFinalizer(True))
        return self._decision(verdicts, (outcome, replicas), [*before, *outcome.children], [])

    def _decision(
        self,
        verdicts: list[Verdict],
        tally_args: tuple[_Outcome, int],
        before: Sequence[Action],
        after: Sequence[Action],
    ) -> Decision:
        outcome, replicas = tally_args
        ledger, stored = self.ledger, self.stored.conditions
        status = status_of(
            self.swarm,
            self.policy.gateway_url,
            tally_of(self.fleet.servers, outcome.plan, replicas, ledger),
            conditions_of(verdicts, stored, self.swarm.generation, self.now),
            ledger,
            outcome.model,
            outcome.plan,
        ).document()
        actions: list[Action] = []
        if status != self.swarm.status:
            actions.append(WriteStatus(status))
        actions += [*before, *ledger.labels, *ledger.creates, *ledger.deletes.values(), *after]
        actions += [*transitions(verdicts, stored), *ledger.told()]
        return Decision(actions, _later(ledger.wake_at, self.now))


def _later(moment: float | None, now: float) -> float | None:
    return moment if moment is not None and moment > now else None


def _refusal(what: str, words: str) -> Problem:
    said = f"{what} is refused by the API server: {words}. It is tried again with growing pauses."
    return Problem("CreateRefused", said, what)


def _last_failure(ledger: Ledger) -> str:
    return max(ledger.slots.values(), key=lambda memory: memory.not_before).last_failure


class _PodMaker:
    """Renders the pod of a slot, in the pool that has the fewest servers of its span."""

    def __init__(self, maker: Maker, spec: Spec, layout: Layout, fleet: Fleet) -> None:
        self._maker, self._spec, self._layout = maker, spec, layout
        self._used: Counter[tuple[int, str]] = Counter(
            (server.slot.span, server.pool) for server in fleet.servers if server.alive
        )

    def __call__(self, slot: SlotKey, incarnation: int) -> Json:
        pool = self._pool(slot)
        self._used[slot.span, pool.name] += 1
        pod = server_pod(self._maker, self._spec, self._layout, slot, pool, incarnation)
        return patched(pod, patches_of(self._spec, pool, self._maker.policy.pod_template))[0]

    def _pool(self, slot: SlotKey) -> Pool:
        pools = self._layout.pools
        turn = (slot.span + slot.ordinal) % len(pools)
        order = [*pools[turn:], *pools[:turn]]
        return min(order, key=lambda pool: self._used[slot.span, pool.name])
