"""Who this server says it is: its Hello to whoever is linked, and its file for those who look in a folder.

Used by `node.py`. Both say the same in two forms; nothing here changes while the process lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import PROTOCOL_VERSION, Hello, Lane, Role
from modelswarm_serving.membership import Member
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.settings import Settings


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    settings: Settings
    peer: PeerId
    shape: ModelShape
    revision: str

    def hello(self, longest_session: int) -> Hello:
        """Its target, if it has none to advertise, is where the links listen."""
        settings, shape = self.settings, self.shape
        return Hello(
            version=PROTOCOL_VERSION,
            peer=self.peer,
            role=Role.SERVER,
            link="",
            lane=Lane.LIVE,
            target=settings.advertise,
            model=settings.served_name,
            revision=self.revision,
            first=shape.first,
            last=shape.last,
            n_blocks=shape.n_blocks,
            dtype=settings.dtype,
            row_bytes=shape.row_bytes,
            max_length=longest_session,
            total_pages=shape.total_pages,
            page_size=shape.page_size,
            hold_ms=round(1000 * (settings.hold_limit_seconds or 0)),
            zone=settings.zone,
            lease_ms=round(1000 * settings.lease_seconds),
            heartbeat_ms=round(1000 * settings.heartbeat_seconds),
        )

    def member(self, target: str, metrics: str) -> Member:
        """For a server that listens at `target`."""
        settings, shape = self.settings, self.shape
        return Member(
            name=settings.name,
            peer=self.peer,
            target=settings.advertise or target,
            model=settings.served_name,
            revision=self.revision,
            first=shape.first,
            last=shape.last,
            n_blocks=shape.n_blocks,
            metrics=metrics,
        )
