"""Tables of planted bugs: what is broken, the scenario that finds it, and within how many seeds.

`PLANTS` are bugs that a range of seeds must find. Each has a budget of seeds, half of which must suffice. So a change
that makes a bug harder to find shows before the bug is missed. `REGRESSIONS` are bugs that the product once had, with
the one seed that finds each. A new bug is a class in this folder and a line here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from support.simulator.actors.server_process import Cores, MakeGateway, MakeServer
from support.simulator.planted.forks import (
    AcknowledgesAtOnce,
    CopiesOneTooFew,
    OutlivesRewinds,
)
from support.simulator.planted.gateways import (
    KeepsSessionsAfterStall,
    TrustsNewestEpochOnly,
)
from support.simulator.planted.isolation import FailsAllHops, GrantsFullWindows
from support.simulator.planted.liveness import (
    EjectsSuspectRoutes,
    EjectsTypicalServers,
    EjectsWholeRoutes,
    IgnoresGoodbyes,
    KeepsClaims,
    NeverEndsGrants,
)
from support.simulator.planted.ownership import (
    ForgetsCutOffs,
    GivesPagesOfTurns,
    GoesOnAfterHolds,
    GoesOnWithoutLinks,
    IgnoresHeldPages,
    KeepsGrantsOfRefusedTurns,
    KeepsReplacedHops,
    KeepsUnrunLogs,
    MigratesWithoutReservation,
    ReleasesReservations,
    SharesHandles,
    SharesPagesWithReads,
    SilentAboutPendingFences,
    TakesOverWithoutReservation,
)
from support.simulator.planted.protocol import (
    AcceptsAnyEpoch,
    AcceptsLateTokens,
    AcceptsRowsTwice,
    DropsEarlyInputs,
    DropsEarlyWindows,
    ForgetsKvLimits,
    ForgetsLimitsOnceSent,
    ForgetsLogLimits,
    IgnoresCredit,
    IgnoresFailedLinks,
    IgnoresOwnedSessions,
    IgnoresWindows,
    MixesLanes,
    MixesLanesAndIgnoresGaps,
    NeverCloses,
    ObeysOldFences,
    SameHandlesEveryBoot,
    SilentAboutLinks,
    StartsTwice,
    TailDoesNotWait,
    TruncatesDuringStep,
    TruncatesTwice,
    drops_empty_records,
    shortens_epochs,
)
from support.simulator.planted.recovery import (
    CutsOverParkedSessions,
    IgnoresRetainedRows,
    LosesScores,
    NeverOverdue,
    NeverSuspects,
)
from support.simulator.planted.regressions import (
    AwaitsLostAnswers,
    CountsEachDirection,
    CountsNoScores,
    ForgetsAwaitedServers,
    IgnoresLostAcknowledgements,
    IgnoresStepsOfFenceAcks,
    KeepsRefusedHops,
    KeepsUnreliableLinks,
    SilentAboutTakenHops,
)
from support.simulator.planted.replay_log import (
    IgnoresHoles,
    KeepsTruncatedRows,
    MixesBoundaries,
    ReadsRowsBefore,
)
from support.simulator.planted.rows import (
    KeepsStaleRows,
    LogsUnwantedTokens,
    RepeatsRows,
    ReplaysRowsOfOtherBlocks,
    SkipsRows,
    TakesRowsOverShifted,
)
from support.simulator.planted.sampling import (
    BeginsResumedTurnsAnew,
    ForcesOldTokens,
    KeepsShiftedLogprobs,
    LogsNoForcedTokens,
    SendsNoForcedTokens,
    ShiftsTop,
    lost_at_migration,
    lost_at_replay,
    lost_at_takeover,
    without_bias,
    without_grammar,
    without_logprobs,
    without_penalties,
)
from support.simulator.planted.swap import gateway_with, server_with
from support.simulator.planted.wakeups import AcknowledgesIdleHopsOnly, DoesNotRecreateHops
from support.simulator.scenarios.base import draw
from support.simulator.trace import Violation
from support.simulator.world import World


@dataclass(frozen=True, slots=True)
class Plant:
    """A bug, the scenario that must find it, and the budget: seeds [0, budget) are tried."""

    cores: Cores
    scenario: str
    budget: int = 100
    is_slow: bool = False  # found after many seconds of CPU: a part of the full tier

    def finding_seed(self, likely: int = 0) -> int | None:
        """Return a seed that finds the bug: the likely one, or else the first. None if no seed of the budget does."""
        others = (seed for seed in range(self.budget) if seed != likely)
        return first_violation(self.cores, self.scenario, (likely, *others))

    def is_near_budget(self, seed: int) -> bool:
        """True if this seed lies beyond half of the budget."""
        return 2 * (seed + 1) > self.budget


@dataclass(frozen=True, slots=True)
class Regression:
    """A bug that the product once had, and a seed that finds it when it is put back."""

    cores: Cores
    scenario: str
    seed: int


def first_violation(cores: Cores, scenario: str, seeds: Iterable[int]) -> int | None:
    """Return the first seed on which an oracle reports a violation; None if there is none.

    Any other exception is raised: a planted bug that crashes, perhaps because the product changed under it, proves
    nothing about the oracles.
    """
    for seed in seeds:
        try:
            World(draw(seed, scenario), cores).run()
        except Violation:
            return seed
    return None


def in_server(bug: MakeServer, scenario: str, budget: int = 100) -> Plant:
    return Plant(Cores(server=bug), scenario, budget)


def in_gateway(bug: MakeGateway, scenario: str, budget: int = 100) -> Plant:
    return Plant(Cores(gateway=bug), scenario, budget)


def in_fencing(bug: type, scenario: str, budget: int = 100) -> Plant:
    return in_server(server_with(lambda core: core._fencing, bug), scenario, budget)


def in_admission(bug: type) -> Plant:
    return in_server(server_with(lambda core: core._fencing.admission, bug), "reserved")


def in_replay_log(bug: type, scenario: str, budget: int = 100) -> Plant:
    return in_server(server_with(lambda core: core._replay_log, bug), scenario, budget)


def in_recovery(bug: type, scenario: str, budget: int = 100) -> Plant:
    return in_gateway(gateway_with(lambda core: core._recovery, bug), scenario, budget)


def in_migrations(bug: type, scenario: str, budget: int = 100) -> Plant:
    return in_gateway(gateway_with(lambda core: core.migrations, bug), scenario, budget)


def in_ownership_check(bug: type, scenario: str, budget: int = 100) -> Plant:
    return in_gateway(gateway_with(lambda core: core._ownership_check, bug), scenario, budget)


def in_hop_table(bug: type, scenario: str) -> Plant:
    return in_gateway(gateway_with(lambda core: core._recovery.hops, bug), scenario)


def in_hop_messages(bug: type, scenario: str) -> Plant:
    return in_gateway(gateway_with(lambda core: core._recovery.hop_messages, bug), scenario)


def in_planner(bug: type, scenario: str) -> Plant:
    return in_gateway(gateway_with(lambda core: core._recovery._planner, bug), scenario)


def in_transfers(bug: type, scenario: str, budget: int = 100) -> Plant:
    return in_server(server_with(lambda core: core._transfers, bug), scenario, budget)


def in_forks(bug: type, budget: int = 100) -> Plant:
    return in_server(server_with(lambda core: core._fencing.forks, bug), "families", budget)


def in_peers(bug: type, scenario: str) -> Plant:
    return in_server(server_with(lambda core: core._peers, bug), scenario)


def slow(plant: Plant) -> Plant:
    return replace(plant, is_slow=True)


def at_seed(plant: Plant, seed: int) -> Regression:
    """Return the regression of a bug that one seed finds; the budget does not count."""
    return Regression(plant.cores, plant.scenario, seed)


PLANTS: dict[str, Plant] = {
    "R1 accepts any epoch": slow(in_server(AcceptsAnyEpoch, "late")),
    "R1 accepts rows twice": in_server(AcceptsRowsTwice, "duplicates"),
    "R1 and R9 mixes lanes, ignores gaps": in_server(MixesLanesAndIgnoresGaps, "slow_bulk"),
    "R2 starts twice": in_server(StartsTwice, "duplicates"),
    "R2 truncates twice": slow(in_server(TruncatesTwice, "duplicates", 200)),
    "R2 obeys old fences": in_server(ObeysOldFences, "duplicates", 200),
    "R2 truncates during a step": in_server(TruncatesDuringStep, "rewinds"),
    "R2 acknowledges idle hops only": in_fencing(AcknowledgesIdleHopsOnly, "rebuilds", 40),
    "R2 same handles every boot": Plant(
        Cores(server=SameHandlesEveryBoot, new_peer_per_boot=False), "delays"
    ),
    "R3 forgets KV limits": in_gateway(ForgetsKvLimits, "rewinds"),
    "R3 forgets log limits": in_gateway(ForgetsLogLimits, "rewinds"),
    "R3 forgets limits once sent": slow(in_gateway(ForgetsLimitsOnceSent, "late", 400)),
    "R3 keeps truncated rows": slow(in_replay_log(KeepsTruncatedRows, "rewinds")),
    "R4 accepts late tokens": in_gateway(AcceptsLateTokens, "one_way"),
    "R5 ignores failed links": in_gateway(IgnoresFailedLinks, "partition"),
    "R5 silent about links": in_server(SilentAboutLinks, "sparse"),
    "R5 does not recreate hops": slow(in_recovery(DoesNotRecreateHops, "rivals", 50)),
    "R6 ignores holes": in_replay_log(IgnoresHoles, "evictions"),
    "R6 reads the rows before": in_replay_log(ReadsRowsBefore, "kills"),
    "R6 mixes boundaries": in_server(MixesBoundaries, "reshaped", 300),
    "R6 ignores retained rows": in_gateway(IgnoresRetainedRows, "kills"),
    "R6 loses scores of a prompt": slow(in_gateway(LosesScores, "prefill")),
    "R7 ignores credit": in_server(IgnoresCredit, "slow_readers"),
    "R9 mixes lanes": in_server(MixesLanes, "slow_bulk"),
    "R10 tail does not wait": in_server(TailDoesNotWait, "slow_bulk"),
    "R10 drops early windows": in_server(DropsEarlyWindows, "mixed"),
    "R10 drops early inputs": in_server(DropsEarlyInputs, "sparse"),
    "R11 ignores windows": in_server(IgnoresWindows, "prefill"),
    "R8 keeps grants of refused turns": in_recovery(KeepsGrantsOfRefusedTurns, "jam", 150),
    "R12 never ends grants": slow(in_fencing(NeverEndsGrants, "handover", 100)),
    "R11 grants full windows": in_server(GrantsFullWindows, "bursts"),
    "R13 cuts over parked sessions": in_migrations(CutsOverParkedSessions, "rebuilds", 200),
    "R13 shares pages with reads": slow(in_transfers(SharesPagesWithReads, "rewound_copies", 150)),
    "R14 logs unwanted tokens": slow(in_server(LogsUnwantedTokens, "rows")),
    "R14 keeps stale rows": in_server(KeepsStaleRows, "rows"),
    "R14 takes rows over shifted": slow(in_recovery(TakesRowsOverShifted, "rows")),
    "R14 repeats rows": in_gateway(RepeatsRows, "rows"),
    "R14 skips rows": in_recovery(SkipsRows, "rows"),
    "R14 replays rows of other blocks": in_hop_messages(ReplaysRowsOfOtherBlocks, "block_rows"),
    "R15 copies one position too few": in_forks(CopiesOneTooFew),
    "R15 copies of rewound parents": slow(in_forks(OutlivesRewinds)),
    "R15 acknowledges at once": in_forks(AcknowledgesAtOnce),
    "R17 forces old tokens": in_server(ForcesOldTokens, "forced"),
    "R17 logs no forced tokens": in_gateway(LogsNoForcedTokens, "forced"),
    "R17 sends no forced tokens": in_server(SendsNoForcedTokens, "forced"),
    "R17 replays without penalties": in_recovery(lost_at_replay(without_penalties), "rules"),
    "R17 replays without a grammar": in_recovery(lost_at_replay(without_grammar), "rules"),
    "R17 replays without logprobs": in_recovery(lost_at_replay(without_logprobs), "rules"),
    "R17 migrates without a bias": slow(in_recovery(lost_at_migration(without_bias), "rules")),
    "R17 migrates without a grammar": in_recovery(lost_at_migration(without_grammar), "rules"),
    "R17 migrates without logprobs": in_recovery(lost_at_migration(without_logprobs), "rules"),
    "R17 takes over without penalties": slow(
        in_gateway(lost_at_takeover(without_penalties), "rules")
    ),
    "R17 takes over without a bias": in_gateway(lost_at_takeover(without_bias), "rules"),
    "R17 takes over without a grammar": slow(
        in_gateway(lost_at_takeover(without_grammar), "rules")
    ),
    "R17 takes over without logprobs": in_gateway(lost_at_takeover(without_logprobs), "rules"),
    "R17 begins resumed turns anew": in_gateway(BeginsResumedTurnsAnew, "rules"),
    "R17 shifts alternatives": in_server(ShiftsTop, "rules"),
    "R17 keeps shifted logprobs": in_gateway(KeepsShiftedLogprobs, "rules"),
    "R19 keeps sessions after a stall": slow(
        in_ownership_check(KeepsSessionsAfterStall, "asleep", 60)
    ),
    "R19 goes on after holds": in_ownership_check(GoesOnAfterHolds, "detours", 50),
    "R19 goes on without links": slow(in_ownership_check(GoesOnWithoutLinks, "returns", 100)),
    "R20 forgets cut-offs": in_ownership_check(ForgetsCutOffs, "returns", 50),
    "R20 shares handles": slow(in_server(SharesHandles, "rivals")),
    "R20 silent about pending Fences": slow(in_fencing(SilentAboutPendingFences, "rivals", 150)),
    "R20 trusts the newest epoch only": slow(in_gateway(TrustsNewestEpochOnly, "doomed")),
    "R20 ignores goodbyes": in_peers(IgnoresGoodbyes, "handover"),
    "R20 keeps claims": slow(
        in_server(server_with(lambda core: core._session_lookup, KeepsClaims), "islands")
    ),
    "R21 ejects whole routes": in_recovery(EjectsWholeRoutes, "frozen"),
    "R21 ejects routes of suspects": in_gateway(
        gateway_with(lambda core: core._health_monitor, EjectsSuspectRoutes), "frozen"
    ),
    "R21 ejects typical servers": in_gateway(
        gateway_with(lambda core: core._health_monitor._outlier_detector, EjectsTypicalServers),
        "detours",
    ),
    "R21 never suspects": in_gateway(NeverSuspects, "frozen"),
    "R21 no token is overdue": slow(in_gateway(NeverOverdue, "one_way")),
    "I5 never closes": in_gateway(NeverCloses, "calm"),
    "I5 ignores OwnedSessions": in_server(IgnoresOwnedSessions, "drops"),
    "I5 keeps replaced hops": in_recovery(KeepsReplacedHops, "drops"),
    "I6 gives pages of turns": in_admission(GivesPagesOfTurns),
    "I6 ignores held pages": in_admission(IgnoresHeldPages),
    "I6 migrates without reservation": in_recovery(MigratesWithoutReservation, "reserved"),
    "I6 releases reservations": in_recovery(ReleasesReservations, "reserved"),
    "I6 takes over without reservation": in_recovery(TakesOverWithoutReservation, "reserved"),
    "I7 fails all hops": in_server(FailsAllHops, "poison"),
    "wire drops empty records": Plant(Cores(codec=drops_empty_records), "adoptions", 20),
    "wire shortens epochs": Plant(Cores(codec=shortens_epochs), "adoptions", 20),
}


LIKELY_SEEDS = {  # of bugs that the first two seeds do not find: the seed that found each last is tried first
    "R2 obeys old fences": 14,
    "R2 acknowledges idle hops only": 4,
    "R4 accepts late tokens": 13,
    "R5 ignores failed links": 2,
    "R5 silent about links": 3,
    "R6 ignores holes": 3,
    "R10 tail does not wait": 8,
    "R10 drops early windows": 2,
    "R8 keeps grants of refused turns": 8,
    "R13 cuts over parked sessions": 9,
    "R14 repeats rows": 2,
    "R15 copies one position too few": 4,
    "R17 forces old tokens": 10,
    "R17 sends no forced tokens": 13,
    "R17 migrates without a grammar": 6,
    "R17 migrates without logprobs": 3,
    "R19 goes on after holds": 6,
    "R21 ejects routes of suspects": 2,
    "R21 never suspects": 2,
    "I6 ignores held pages": 2,
    "I6 migrates without reservation": 13,
    "I6 releases reservations": 7,
    "I6 takes over without reservation": 24,
    "I7 fails all hops": 6,
    "wire shortens epochs": 2,
}


REGRESSIONS: dict[str, Regression] = {
    "keeps unreliable links": at_seed(in_planner(KeepsUnreliableLinks, "partition"), 2),
    "counts each direction": at_seed(in_recovery(CountsEachDirection, "one_way"), 47),
    "ignores lost acknowledgements": at_seed(
        in_recovery(IgnoresLostAcknowledgements, "one_way"), 1_300_025
    ),
    "ignores steps of FenceAcks": at_seed(in_gateway(IgnoresStepsOfFenceAcks, "stops"), 1_400_066),
    "counts no scores": at_seed(in_gateway(CountsNoScores, "slow_bulk"), 1_500_212),
    "keeps refused hops": at_seed(in_hop_table(KeepsRefusedHops, "rivals"), 3),
    "awaits lost answers": at_seed(in_hop_table(AwaitsLostAnswers, "extinction"), 223),
    "forgets awaited servers": at_seed(
        in_ownership_check(ForgetsAwaitedServers, "returns"), 800_063
    ),
    "keeps unrun logs": at_seed(in_fencing(KeepsUnrunLogs, "rivals"), 110),
    "silent about taken hops": at_seed(in_server(SilentAboutTakenHops, "rivals"), 2),
}
