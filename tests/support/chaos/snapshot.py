"""A view of a swarm from outside: held sessions and memory, causes of re-routes, state and logs.

Used by `run.py`. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from support.chaos.clients import Client
from support.chaos.swarm import World
from support.processes.swarm import metrics, total

HELD = ("modelswarm_server_sessions", "modelswarm_server_replay_bytes")


def held(scene: World) -> dict[str, float]:
    """Count what gateways and servers still hold of sessions, except pages: by process and metric."""
    found = scene.gateway_sessions()
    for member in scene.running.members():
        values = metrics(member.metrics)
        for name in HELD:
            found[f"{member.name}: {name}"] = total(values, name)
    return {what: count for what, count in found.items() if count}


def loops(scene: World) -> dict[str, int]:
    """Count re-routes of sessions by cause; of a gateway that was killed, only since its restart."""
    found: Counter[str] = Counter()
    for target in scene.gateway_metrics().values():
        for sample, count in metrics(target).items():
            name, _, labels = sample.partition("{")
            if name == "modelswarm_gateway_reroutes_total" and count:
                found[labels.partition('cause="')[2].partition('"')[0]] += int(count)
    return dict(found)


def look(scene: World, clients: Sequence[Client]) -> str:
    """Describe the swarm as it is now, as far as it answers."""
    lines = [f"{client.name} waits for {client.doing}" for client in clients if client.doing]
    try:
        snapshot = scene.running.view.fetch_snapshot()
        lines += [f"session {str(session)!r}" for session in snapshot.sessions]
        lines += [f"server {str(server)!r}" for server in snapshot.servers]
    except Exception as problem:  # the swarm may still be disturbed
        lines.append(f"the gateway does not say: {problem}")
    for log in sorted(scene.running.local.logs.glob("*.log")):
        lines.append(f"--- {log.name}")
        lines += log.read_text(errors="replace").splitlines()[-12:]
    return "\n".join(lines)
