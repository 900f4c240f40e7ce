"""The parts that several modules of one server core share.

Made by `server.py`, passed to the constructors of `Fencing`, `KvForks`, `Steps` and `KvTransfers`. Knows only the
types.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm_serving.core.flow.flow_control import FlowControl
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.peers import Peers
from modelswarm_serving.core.hops.replay_log import ReplayLog
from modelswarm_serving.core.scheduler import Scheduler
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape


@dataclass(frozen=True, slots=True)
class CoreParts:
    settings: ServerSettings
    shape: ModelShape
    peers: Peers
    outbox: Outbox
    scheduler: Scheduler
    flow_control: FlowControl
    replay_log: ReplayLog
