"""A network between the processes of a swarm that can be disturbed: one proxy in front of each server.

A server listens at one port and advertises its proxy's, so that the gateway and the other servers dial that. The
dialler's name is read from its Hello. From then on a connection has two directed links, and all faults act on directed
links. Used by `faults.py` from other threads; runs on a loop and a thread of its own.

A blocked link keeps the bytes that it is given, like a cut network that heals before the connections break. Nothing is
lost within a connection, and the end of a peer is not noticed meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.chaos.link_frames import FrameCutter, hello_of, message_of

from modelswarm.protocol.identity import name_of

HOST = "127.0.0.1"
CHUNK = 64 << 10
QUEUED_FRAMES = 256  # bytes per direction; more make the sender wait
CALL_SECONDS = 60.0
CLOSE_SECONDS = 5.0
UNKNOWN = "?"  # name of a dialler until its Hello arrives


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """The faults of the directed link from `source` to `to`."""

    source: str
    to: str
    blocked: bool = False
    delay: float = 0.0  # seconds
    rate: float = 0.0  # bytes per second; 0: unlimited
    doubled: float = 0.0  # share of frames
    cause: str = ""


class Network:
    """All proxies. Every method may be called from any thread."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._link_faults: list[LinkFaults] = []
        self._changed = asyncio.Event()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self.doubled = self.truncated = 0  # frames
        self.affected: Counter[str] = Counter()  # affected frames, by the cause of the fault
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def proxy(self, name: str, port: int) -> str:
        """Return the address at which to dial the server of that name, which listens at `port`."""

        async def start() -> str:
            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await self._serve(name, port, _End(reader, writer))

            server = await asyncio.start_server(accept, HOST, 0)
            self._servers.append(server)
            return f"{HOST}:{server.sockets[0].getsockname()[1]}"

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(CALL_SECONDS)

    def disturb(self, *faults: LinkFaults) -> Callable[[], None]:
        """Apply the faults until the returned function is called."""

        def begin() -> None:
            self._link_faults += faults
            self._wake()

        def end() -> None:
            for one in faults:
                self._link_faults.remove(one)
            self._wake()

        self._loop.call_soon_threadsafe(begin)
        return lambda: self._say(end)

    def truncate(self, source: str, to: str) -> None:
        """Reset each of their connections after half of its next frame."""

        def cut() -> None:
            for connection in self._connections:
                for pipe in connection.pipes:
                    if (pipe.source, pipe.to) == (source, to):
                        pipe.truncate = True

        self._say(cut)

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CALL_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_SECONDS)
            self._loop.close()

    def _say(self, what: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(what)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    async def _serve(self, name: str, port: int, dialler: _End) -> None:
        """Serve one connection until both of its directions have ended."""
        try:
            reader, writer = await asyncio.open_connection(HOST, port)
        except OSError:
            dialler.abort()  # like a refused connection
            return
        connection = _Connection(self, name, dialler, _End(reader, writer))
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    # ---- called by pipes

    def link_faults(self, source: str, to: str) -> LinkFaults:
        """Return the sum of all faults of this link."""
        found = [one for one in self._link_faults if (one.source, one.to) == (source, to)]
        return LinkFaults(
            source,
            to,
            blocked=any(one.blocked for one in found),
            delay=max((one.delay for one in found), default=0.0),
            rate=min((one.rate for one in found if one.rate), default=0.0),
            doubled=max((one.doubled for one in found), default=0.0),
        )

    async def wait_passable(self, pipe: _Pipe) -> LinkFaults:
        """Wait until the link is not blocked."""
        while (faults := self.link_faults(pipe.source, pipe.to)).blocked:
            await self._changed.wait()
        return faults

    def count_frame(self, source: str, to: str) -> None:
        """Count a frame that a fault affects."""
        self.affected.update(
            one.cause for one in self._link_faults if (one.source, one.to) == (source, to)
        )

    def doubles(self, share: float) -> bool:
        return share > 0 and self._rng.random() < share


@dataclass(frozen=True, slots=True)
class _End:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def abort(self) -> None:
        """Reset the connection: bytes under way are lost."""
        self.writer.transport.abort()


@dataclass(eq=False, slots=True)
class _Connection:
    network: Network
    server: str
    dialler: _End
    listener: _End
    pipes: tuple[_Pipe, ...] = ()

    async def run(self) -> None:
        self.pipes = (
            _Pipe(self, self.dialler, self.listener, UNKNOWN, self.server),
            _Pipe(self, self.listener, self.dialler, self.server, UNKNOWN),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for pipe in self.pipes:
                    tasks.create_task(pipe.read())
                    tasks.create_task(pipe.write())
        except* (OSError, _Reset):
            pass  # the ends are told below
        finally:
            self.dialler.abort()
            self.listener.abort()

    def name_dialler(self, name: str) -> None:
        up, down = self.pipes
        up.source = down.to = name


class _Reset(Exception):
    """End the connection in both directions."""


@dataclass(eq=False, slots=True)
class _Pipe:
    """One direction of a connection: reads frames at once and writes them when no fault holds them."""

    connection: _Connection
    input: _End
    output: _End
    source: str
    to: str
    truncate: bool = False
    begun: bool = False  # its Hello has passed
    frames: FrameCutter = field(default_factory=FrameCutter)
    queue: asyncio.Queue[tuple[float, bytes]] = field(
        default_factory=lambda: asyncio.Queue(QUEUED_FRAMES)
    )

    async def read(self) -> None:
        clock = asyncio.get_running_loop().time
        reset = False
        while not reset:
            try:
                data = await self.input.reader.read(CHUNK)
            except ConnectionError:
                reset = True  # the peer sees the end after all bytes before it
                continue
            if not data:
                break
            for frame in self.frames.feed(data):
                self._look(frame)
                self.connection.network.count_frame(self.source, self.to)
                await self.queue.put((clock(), frame))
        await self.queue.put((-1.0 if reset else clock(), b""))

    def _look(self, frame: bytes) -> None:
        if self.source == UNKNOWN and (hello := hello_of(frame)):
            self.connection.name_dialler(name_of(hello.peer))

    async def write(self) -> None:
        network, writer = self.connection.network, self.output.writer
        clock = asyncio.get_running_loop().time
        while True:
            came, frame = await self.queue.get()
            faults = await network.wait_passable(self)
            if faults.delay and came > 0:
                await asyncio.sleep(max(0.0, came + faults.delay - clock()))
            if faults.rate:
                await asyncio.sleep(len(frame) / faults.rate)
            if not frame:
                break
            if self.truncate:
                await self._end_within(frame)
            writer.write(frame)
            if self._may_double(frame) and network.doubles(faults.doubled):
                network.doubled += 1
                writer.write(frame)
            await writer.drain()
        if came < 0:
            raise _Reset
        if writer.can_write_eof():
            writer.write_eof()

    def _may_double(self, frame: bytes) -> bool:
        """Return True for messages behind Hello, which the protocol allows once."""
        begun = self.begun
        self.begun = begun or hello_of(frame) is not None
        return begun and message_of(frame) is not None

    async def _end_within(self, frame: bytes) -> Any:
        self.connection.network.truncated += 1
        self.output.writer.write(frame[: len(frame) // 2])
        await self.output.writer.drain()
        raise _Reset
