"""Invariants of the ownership model. Each returns the description of what is broken, or ""."""

from __future__ import annotations

from support.ownership_model.state import (
    NONE,
    PARKED,
    RUNNING,
    State,
)


def fault_of_token(before: State, g: int) -> str:
    """A token continues the newest log that a client has read, while a server that has it is alive."""
    mine = before.gateways[g]
    has_log = has_live_holder(before)
    if has_log and mine.log[: len(before.read)] != before.read:
        return f"gateway {g} emits a token on the log {mine.log}, but {before.read} was read"
    return ""


def has_live_holder(state: State) -> bool:
    return any(
        held and server.alive for held, server in zip(state.holders, state.servers, strict=True)
    )


def fault_of(state: State) -> str:
    """Return the first invariant that the state breaks, or ""."""
    return state.fault or _fault_of_hops(state) or _fault_at_rest(state)


def _fault_of_hops(state: State) -> str:
    """Two gateways never run on one hop."""
    for s, server in enumerate(state.servers):
        hop = server.hop
        if hop is None or not server.alive:
            continue
        if hop.phase == RUNNING and hop.epoch[1] != hop.owner + 1:
            return f"hop of server {s} runs epoch {hop.epoch}, but gateway {hop.owner} owns it"
        runners = [
            g
            for g, each in enumerate(state.gateways)
            if each.state == RUNNING
            and (view := each.views[s]) is not None
            and view.handle == hop.handle
        ]
        if len(runners) > 1:
            return f"gateways {runners} run on the hop of server {s}"
    return ""


def _fault_at_rest(state: State) -> str:
    """At rest one gateway runs the session at most; and what a client has read is found, if no gateway has it."""
    if not is_at_rest(state):
        return ""
    running = [g for g, each in enumerate(state.gateways) if each.state == RUNNING]
    if len(running) > 1:
        return f"gateways {running} run the session, and all servers are in reach of both"
    has_owner = any(each.alive and each.state != NONE for each in state.gateways)
    if has_owner or not has_live_holder(state):
        return ""
    logs = [log for _, log in newest_logs(state)]
    if not any(log[: len(state.read)] == state.read for log in logs[:1]):
        return f"the log {state.read} was read and its server lives, but {logs} is found"
    return ""


def newest_logs(state: State) -> list[tuple[int, tuple[int, ...]]]:
    """Return (length, log) of the hops of the newest epoch that ran and has a log, the longest first."""
    hops = [s.hop for s in state.servers if s.alive and s.hop is not None]
    for run in sorted({hop.run for hop in hops}, reverse=True):
        logs = [hop.durable for hop in hops if run in (hop.run, hop.epoch) and hop.durable]
        if logs and run[0]:
            return sorted(((len(log), log) for log in logs), reverse=True)
    return []


def is_at_rest(state: State) -> bool:
    """True if no message is on its way, every living process reaches every other, and no deadline is pending."""
    if any(state.lanes):
        return False
    for g, each in enumerate(state.gateways):
        if not each.alive:
            continue
        if each.frozen or each.state not in (NONE, PARKED, RUNNING):
            return False
        if any(server.alive and not server.linked[g] for server in state.servers):
            return False
    return True
