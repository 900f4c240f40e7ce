"""Start progress: asks servers that are not ready yet what their start waits for, for the swarm's conditions.

Run by `manager` beside the workers, never inside a turn. A server answers on its probe port; an answer that changes
wakes its swarm, and no answer means no words in the condition. Servers run images of users: an answer is bounded, and
every kind of answer is allowed. Decides nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelswarm.placement.quantity import human_share
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.reconcile.manifests.manifests import METRICS_PORT
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import PodView

log = logging.getLogger(__name__)
POLL_SECONDS = 5.0
# Seconds for which a container runs before it is asked; a small model is ready by then.
MIN_AGE_SECONDS = 5.0
REQUEST_SECONDS = 2.0
MAX_CONCURRENT_REQUESTS = 16
# Servers asked in one round, those asked longest ago first: it bounds the writes of status that follow.
MAX_SERVERS_PER_ROUND = 64
MAX_BODY_BYTES = 4096
MAX_WORDS_LENGTH = 200  # characters of an answer that are shown


class _Progress(BaseModel):
    """Body of /ready of a server that starts. Another version may leave out fields."""

    model_config = ConfigDict(extra="ignore")

    phase: str = ""
    done: float = Field(default=0, ge=0, allow_inf_nan=False)
    total: float = Field(default=0, ge=0, allow_inf_nan=False)
    reason: str | None = None


def describe_progress(body: bytes) -> str:
    """Return an answer in words, such as `reading weights, 3.1 of 8.2 GiB`; "" if it has none."""
    try:
        progress = _Progress.model_validate(json.loads(body))
    except (ValidationError, ValueError, RecursionError):
        return ""
    parts = [progress.phase]
    if progress.phase and progress.total > 0:
        parts.append(human_share(int(min(progress.done, progress.total)), int(progress.total)))
    parts.append(progress.reason or "")
    text = " ".join(", ".join(part for part in parts if part).split())
    return "".join(sign for sign in text if sign.isprintable())[:MAX_WORDS_LENGTH]


def open_session() -> aiohttp.ClientSession:
    """Return a session for `read_once`; it needs a running event loop."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
        connector=aiohttp.TCPConnector(force_close=True),
        auto_decompress=False,  # a small answer may become a large one
    )


class StartProgressReader:
    def __init__(
        self, cache: Cache, enqueue: Callable[[set[str]], None], port: int = METRICS_PORT
    ) -> None:
        """`enqueue` wakes the swarms of these uids."""
        self._cache, self._enqueue, self._port = cache, enqueue, port
        self._words: dict[str, str] = {}  # by the pod's uid
        self._asked_at: dict[str, float] = {}  # by the pod's uid; monotonic seconds
        self._free_requests = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def run(self) -> None:
        """Run until cancelled."""
        async with open_session() as session:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                try:
                    await self.read_once(session, time.time())
                except Exception:  # conditions without progress are better than no operator
                    log.exception("internal error while servers are asked for their progress")

    async def read_once(self, session: aiohttp.ClientSession, now: float) -> None:
        starting = {pod.uid: pod for pod in self._cache.owned_pods() if _is_starting(pod, now)}
        self._words = {uid: words for uid, words in self._words.items() if uid in starting}
        self._asked_at = {uid: at for uid, at in self._asked_at.items() if uid in starting}
        chosen = sorted(starting, key=lambda uid: self._asked_at.get(uid, 0.0))
        chosen = chosen[:MAX_SERVERS_PER_ROUND]
        answers = await asyncio.gather(*(self._ask(session, starting[uid]) for uid in chosen))
        self._words |= dict(zip(chosen, answers, strict=True))
        self._asked_at |= dict.fromkeys(chosen, time.monotonic())
        self._enqueue(self._cache.set_start_progress(self._words))

    async def _ask(self, session: aiohttp.ClientSession, pod: PodView) -> str:
        """Return a server's progress in words; "" without an answer."""
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        try:
            async with (
                self._free_requests,
                session.get(f"http://{host}:{self._port}/ready", allow_redirects=False) as answer,
            ):
                if answer.status != 503:
                    return ""
                return describe_progress(await answer.content.read(MAX_BODY_BYTES))
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError
            return ""


def _is_starting(pod: PodView, now: float) -> bool:
    since = pod.container.running_since
    return (
        pod.labels.get(names.ROLE) == names.SERVER
        and pod.ip != ""
        and not pod.ready
        and pod.deleting_since is None
        and since is not None
        and now - since >= MIN_AGE_SECONDS
    )
