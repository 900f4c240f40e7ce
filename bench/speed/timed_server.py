"""A block server that notes the time of each part of its steps: `python -m bench.speed.timed_server FILE FLAG ...`.

For one stream at a time: its frames are those with rows, tokens or inputs. All times are CLOCK_MONOTONIC in ns, which
the processes of a machine share. The file is written when the server stops. Notes cost some 3 us per step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from modelswarm.protocol.link import lane
from modelswarm.protocol.messages import Input, Rows, Token
from modelswarm_serving.model.linear.product_caches import limit_product_caches

MARKS = (
    "frame",  # the socket gave the frame with the rows or the token
    "decoded",
    "received",  # by the core
    "submitted",  # the batch is planned
    "begun",  # in the engine's thread
    "laid_out",
    "computed",  # by the blocks
    "ended",
    "returned",  # to the event loop
    "answered",  # by the core
    "queued",  # for the next server
    "encoded",
    "written",  # the socket has taken the frame
)
_PAYLOADS = (Rows, Token, Input)

Step = dict[str, int]


class Recorder:
    """The marks of all steps; each mark of a step counts once."""

    def __init__(self) -> None:
        self.steps: list[Step] = [{}]

    def begin(self, frame: int, decoded: int) -> None:
        self.steps.append({"frame": frame, "decoded": decoded})

    def mark(self, name: str) -> None:
        self.steps[-1].setdefault(name, time.monotonic_ns())

    def install(self) -> None:
        """Let the parts of this process note their times."""
        from modelswarm_serving.core.server import ServerCore
        from modelswarm_serving.model.transformer.span import TransformerSpan
        from modelswarm_serving.runtime.engine import Engine
        from modelswarm_serving.runtime.node import Node

        self._watch(ServerCore, "receive", after="received")
        self._watch(Engine, "submit", before="submitted")
        self._watch(TransformerSpan, "step", before="begun", after="ended")
        self._watch(TransformerSpan, "_run_blocks", before="laid_out", after="computed")
        self._watch(Node, "_on_step_done", before="returned")
        self._watch(ServerCore, "finish_step", after="answered")
        self._watch_frames(lane)

    def _watch(self, owner: type, name: str, before: str = "", after: str = "") -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            if before:
                self.mark(before)
            result = original(*arguments, **named)
            if after:
                self.mark(after)
            return result

        setattr(owner, name, watched)

    def _watch_frames(self, module: Any) -> None:
        unpack, pack = module.unpack, module.pack

        def timed_unpack(frame: Buffer) -> list[Any]:
            began = time.monotonic_ns()
            items: list[Any] = unpack(frame)
            if has_payload(items):
                self.begin(began, time.monotonic_ns())
            return items

        def timed_pack(items: list[Any], report: Any) -> Iterator[bytes]:
            """`report`: a method of the lane that sends the frames."""
            if not (has_payload(items) and report.__self__._peer.startswith("s")):
                yield from pack(items, report)
                return
            self.mark("queued")
            frames = list(pack(items, report))
            self.mark("encoded")
            yield from frames
            self.mark("written")  # the lane asks for the next frame

        module.unpack, module.pack = timed_unpack, timed_pack


def has_payload(items: list[Any]) -> bool:
    return any(isinstance(item, _PAYLOADS) for item in items)


def main(file: Path, flags: list[str]) -> None:
    limit_product_caches()
    from modelswarm_serving.app import run

    recorder = Recorder()
    recorder.install()
    code = run(flags)
    file.write_text(json.dumps(recorder.steps))
    os._exit(code)  # as a server does


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
