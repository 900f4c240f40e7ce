"""Long texts are tokenized a few at a time, also when their clients leave, and the queue is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from support.eventually import SECONDS
from support.models.tokenizers import byte_level, make_tokenizer, model_files
from tokenizers import AddedToken

from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import GenerationRequest, TextPrompt, encode_prompt
from modelswarm_gateway.models.encode_pool import (
    MAX_CHARACTERS,
    MAX_LARGE_REQUESTS,
    MAX_WAITING_TEXTS,
    EncodePool,
    TooManyTexts,
)
from modelswarm_gateway.models.model_requests import SMALL_REQUEST_BYTES
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.models.tokenizer import ModelTokenizer, TextTooLong

BLANKS = 128  # characters of the longest token, as in Llama 3


class Gate:
    """Work that lasts until `open` is called."""

    def __init__(self) -> None:
        self.running = 0
        self._lock, self._opened = threading.Lock(), threading.Event()

    def work(self) -> int:
        with self._lock:
            self.running += 1
        assert self._opened.wait(SECONDS)
        return self.running

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


async def start_running(pool: EncodePool, gate: Gate, characters: int = 1) -> asyncio.Task[int]:
    """Occupy the only place of the pool with a text of `characters` characters."""
    before = gate.running
    task = asyncio.create_task(pool.run(gate.work, characters))
    async with asyncio.timeout(SECONDS):
        while gate.running == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return task


async def cancel(task: asyncio.Task[int]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_place_is_held_until_the_thread_has_ended(gate: Gate) -> None:
    pool = EncodePool()
    await cancel(await start_running(pool, gate))
    waiting = asyncio.create_task(pool.run(lambda: gate.running, 1))
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done, "the thread still runs, although its client has left"
    gate.open()
    async with asyncio.timeout(SECONDS):
        assert await waiting == 1


async def test_all_models_share_the_places_fairly(gate: Gate) -> None:
    """A model that waits for its own place holds none of the others'."""
    shared = asyncio.Semaphore(MAX_LARGE_REQUESTS)
    pools = [EncodePool(shared) for _ in range(MAX_LARGE_REQUESTS + 1)]
    first = await start_running(pools[0], gate)
    more = [asyncio.create_task(pools[0].run(gate.work, 1)) for _ in range(5)]
    second = await start_running(pools[1], gate)
    third = asyncio.create_task(pools[2].run(gate.work, 1))
    done, _ = await asyncio.wait({third}, timeout=0.1)
    assert not done
    assert gate.running == MAX_LARGE_REQUESTS
    gate.open()
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(first, second, third, *more)


async def test_client_that_leaves_the_queue_frees_its_turn(gate: Gate) -> None:
    shared = asyncio.Semaphore(1)
    busy, pool = EncodePool(shared), EncodePool(shared)
    running = await start_running(busy, gate)
    waiting = asyncio.create_task(pool.run(gate.work, 1))
    await asyncio.sleep(0)
    await cancel(waiting)
    again = asyncio.create_task(pool.run(gate.work, 1))
    gate.open()
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(running, again)


async def test_characters_count_until_the_thread_has_ended(gate: Gate) -> None:
    """The client has left, but the process still needs memory for each of them."""
    pool = EncodePool()
    await cancel(await start_running(pool, gate, MAX_CHARACTERS))
    with pytest.raises(TooManyTexts):
        await pool.run(gate.work, 1)
    gate.open()


async def test_only_so_many_texts_wait(gate: Gate) -> None:
    pool = EncodePool()
    await start_running(pool, gate)
    waiting = [asyncio.create_task(pool.run(gate.work, 1)) for _ in range(MAX_WAITING_TEXTS)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyTexts):
        await pool.run(gate.work, 1)
    await cancel(waiting[0])
    again = asyncio.create_task(pool.run(gate.work, 1))
    gate.open()
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*waiting[1:], again)


async def test_characters_of_all_texts_are_bounded(gate: Gate) -> None:
    pool = EncodePool()
    await start_running(pool, gate)
    with pytest.raises(TooManyTexts):
        await pool.run(gate.work, MAX_CHARACTERS)


async def test_prompt_beyond_the_waiting_texts_gets_429() -> None:
    """All places are taken, so that each further prompt waits."""
    places = asyncio.Semaphore(MAX_LARGE_REQUESTS)
    for _ in range(MAX_LARGE_REQUESTS):
        await places.acquire()
    tokenizer = ModelTokenizer(model_files(), places, name="toy")
    prompt = TextPrompt("a" * (SMALL_REQUEST_BYTES + 1))
    request = GenerationRequest("m", prompt, "prompt", SamplingOptions())
    # One has the model's own place and waits for one of all models.
    waiting = [
        asyncio.create_task(encode_prompt(request, tokenizer, 1 << 20))
        for _ in range(MAX_WAITING_TEXTS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await encode_prompt(request, tokenizer, 1 << 20)
    assert (refused.value.code, refused.value.retry_after) == (Code.NO_CAPACITY, 1.0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def with_blanks() -> dict[str, bytes]:
    """Return model files whose tokenizer has a token of many blanks."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(" " * BLANKS, normalized=False)])
    files = model_files(config={"vocab_size": tokenizer.get_vocab_size()})
    return files | {"tokenizer.json": tokenizer.to_str().encode()}


async def test_long_tokens_do_not_lift_the_bound_on_characters() -> None:
    """A token of 128 blanks would allow 128 characters per token, which no text reaches."""
    tokenizer, limit = make_tokenizer(with_blanks()), 10_000
    with pytest.raises(TextTooLong, match="characters are more than"):
        await tokenizer.encode("a " * (limit * BLANKS // 4), special=False, limit=limit)


@pytest.mark.parametrize("limit", [1 << 22, 1 << 62])
async def test_long_context_does_not_lift_the_bound_on_characters(limit: int) -> None:
    """A server states the length of its contexts, and memory is needed for each character."""
    with pytest.raises(TextTooLong, match="characters are more than 2097152"):
        await make_tokenizer().encode("a" * ((2 << 20) + 1), special=False, limit=limit)


async def test_dense_text_is_refused_by_its_tokens_in_pieces() -> None:
    tokenizer, limit = make_tokenizer(with_blanks()), 10_000
    with pytest.raises(TextTooLong, match="more than 10000 tokens"):
        await tokenizer.encode("a " * (5 * limit), special=False, limit=limit)
    sparse = (" " * BLANKS) * (12 * limit // BLANKS)
    ids = await tokenizer.encode(sparse, special=False, limit=limit)
    assert len(ids) == 12 * limit // BLANKS
