"""The identity of this server: its Hello for every link, and its run file for the discovery folder.

Used by `node.py`. Both hold the same facts in two forms. Nothing here changes while the process runs; knows no links.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from modelswarm.process.run_files import ServerFile
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import PROTOCOL_VERSION, Adapter, Hello, Lane, Role
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.settings import Settings


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    settings: Settings
    peer: PeerId
    shape: ModelShape
    revision: str
    numerics: str = ""  # numerics class; empty: unknown

    def hello(
        self, longest_session: int, grammar: str, adapters: Collection[Adapter] = ()
    ) -> Hello:
        """Return the Hello. An empty `target` means the address where the links listen.

        `grammar`: library and version of its grammars; empty: it has none.
        """
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
            grammar=grammar,
            logit_bytes=shape.logit_bytes if shape.is_tail else 0,
            hidden_bytes=shape.hidden_bytes if shape.is_tail else 0,
            numerics=self.numerics,
            adapters=tuple(sorted(adapters)),
        )

    def run_file(self, target: str, metrics: str) -> ServerFile:
        """Return the run file of this server, which listens at `target`."""
        settings, shape = self.settings, self.shape
        return ServerFile(
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
