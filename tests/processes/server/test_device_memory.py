"""Pages of a span on an accelerator: as many as weights and the largest step leave, or one sentence with the numbers.

The device library is a stand-in, and tensors are on the CPU. Everything else is the code that runs on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.chain import Chain, Stream, load_chain
from support.models.device_library import DeviceLibrary
from support.models.tiny_models import make_model
from support.processes.fake_gateway import FakeGateway, fake_gateway
from support.processes.server import ServerProcess
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from modelswarm.checkpoint.facts import read_facts
from modelswarm.errors import DeviceError, UserError
from modelswarm.placement.memory import PREFILL_ROWS, PROCESS_BYTES
from modelswarm_serving.app import load as load_settings
from modelswarm_serving.model.attention.backend_names import AUTO
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.base import BatchItem, ModelShape, OutOfDeviceMemory
from modelswarm_serving.model.device import HOST
from modelswarm_serving.model.passes.contract import PassTask
from modelswarm_serving.model.transformer.device_pages import largest_step
from modelswarm_serving.model.transformer.loading import load_modules
from modelswarm_serving.model.transformer.served_blocks import check_served, choose_blocks
from modelswarm_serving.model.transformer.span import TransformerSpan
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span
from modelswarm_serving.runtime.engine import Engine, PartDone, StepDone
from modelswarm_serving.runtime.liveness import Liveness
from modelswarm_serving.runtime.node import Node
from modelswarm_serving.settings import parse_settings

MIB = 1 << 20
BLOCKS = 4
FAULT = (
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


def options_on(library: DeviceLibrary, **changes: Any) -> SpanOptions:
    options = SpanOptions(threads=1, page_size=4, max_length=64, token_budget=32)
    return replace(options, device=library.open(), **changes)


def load(folder: Path, library: DeviceLibrary, **changes: Any) -> TransformerSpan:
    return load_span(folder, 0, BLOCKS, options_on(library, **changes))


def page_bytes(folder: Path) -> int:
    return 4 * BLOCKS * read_facts(folder).kv_bytes("float32")


def test_pages_fill_what_weights_and_step_leave(folder: Path) -> None:
    library = DeviceLibrary(total=64 * MIB, others=8 * MIB, step=4 * MIB)
    span = load(folder, library)

    weights = read_facts(folder).weight_bytes(0, BLOCKS, "float32")
    room = int(0.9 * library.total) - library.others - library.step - weights
    assert 0.9 * room < span.shape.total_pages * page_bytes(folder) <= room
    free, _ = library.memory(torch.device("cpu"))
    assert free >= library.step + int(0.1 * library.total) - MIB, "the step still fits"
    assert span.compute.device == "cuda:0"


class LoadedWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the blocks whose weights are alive as transformers loaded them, at each join and each attention."""

    def __init__(self, layers: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = [weakref.ref(layer.self_attn.q_proj.weight) for layer in layers]
        self.joins: list[int] = []
        self.attentions: list[int] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        alive = [each for weight in self._weights if (each := weight()) is not None]
        if func.name() == "aten::cat" and any(args[0][0] is each for each in alive):
            self.joins.append(len(alive))
        if func.name() == "aten::index_copy_":  # keys and values of a block
            self.attentions.append(len(alive))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weights_are_freed_as_their_block_is_fused(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family)
    facts, cpu = read_facts(model), torch.device("cpu")
    loaded = load_modules(model, facts.config.all_blocks, torch.float32, cpu)
    parts, heads, size = loaded.kv_shape(facts.kv_elements)
    cache = KvCache(KvCacheShape(BLOCKS, 4, 4, heads, size, parts), torch.float32, cpu)
    with LoadedWeights(cast("Any", loaded.body).layers) as seen:
        served = choose_blocks(loaded, cache, model, 1)
        check_served(served, cache, HOST, model, AUTO, max_length=16)
    assert seen.joins == [4, 3, 2, 1]
    assert seen.attentions == [*[BLOCKS] * BLOCKS, *[0] * BLOCKS]


def test_smaller_fraction_gives_fewer_pages(folder: Path) -> None:
    pages = [
        load(folder, DeviceLibrary(total=32 * MIB), memory_fraction=fraction).shape.total_pages
        for fraction in (0.5, 0.9, 1.0)
    ]
    assert pages == sorted(pages)
    context = 32 * MIB // 64  # which other servers of the device may hide
    left = 0.4 * 32 * MIB + context
    assert pages[1] - pages[0] == pytest.approx(left / page_bytes(folder), abs=2)


def test_servers_share_a_device_by_their_fractions(folder: Path) -> None:
    """The second one starts when the first has filled its half."""
    alone, half = DeviceLibrary(total=64 * MIB), int(0.45 * 64 * MIB)
    filled = DeviceLibrary(total=64 * MIB, others=half)
    first, second = (load(folder, each, memory_fraction=0.45) for each in (alone, filled))
    assert second.shape.total_pages == pytest.approx(first.shape.total_pages, abs=2)
    overfull = DeviceLibrary(total=64 * MIB, others=half + 4 * MIB)
    third = load(folder, overfull, memory_fraction=0.45)
    missing = first.shape.total_pages - third.shape.total_pages
    assert missing == pytest.approx((4 * MIB - 64 * MIB // 64) / page_bytes(folder), abs=2)


@pytest.mark.parametrize("servers", [4, 8])
def test_last_server_on_a_device_has_as_many_pages(folder: Path, servers: int) -> None:
    """Each server takes a context beside its tensors, of which the earlier ones see nothing."""
    total, context = 96 * MIB, MIB
    share = 0.9 / servers
    first = load(folder, DeviceLibrary(total=total, others=context), memory_fraction=share)
    earlier = (servers - 1) * int(share * total)
    last = DeviceLibrary(total=total, others=earlier + context)
    pages = load(folder, last, memory_fraction=share).shape.total_pages
    assert pages == pytest.approx(first.shape.total_pages, abs=2)


def test_memory_of_passes_is_left_free(folder: Path) -> None:
    library = DeviceLibrary(total=32 * MIB)
    free = load(folder, library).shape.total_pages
    left = load(folder, DeviceLibrary(total=32 * MIB), training_memory=8 * MIB).shape.total_pages
    assert free - left == pytest.approx(8 * MIB / page_bytes(folder), abs=2)
    with pytest.raises(DeviceError, match=r"passes 32 MiB, unused by --memory-fraction"):
        load(folder, DeviceLibrary(total=32 * MIB), training_memory=32 * MIB)


@pytest.mark.parametrize(("flags", "reserved"), [([], 0), (["--training-memory", "8Mi"], 8 * MIB)])
def test_passes_get_what_is_reserved_on_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], reserved: int
) -> None:
    library = DeviceLibrary(total=32 * MIB)
    library.open()
    monkeypatch.setattr("modelswarm_serving.model.device.TorchDrivers", lambda: library)
    usual = ["--model", folder.as_uri(), "--blocks", "0:4", "--page-size", "4", "--device", "cuda"]
    usual += ["--name", "s0", "--discovery-dir", str(folder)]
    settings = parse_settings([*usual, "--max-length", "64", "--token-budget", "32", *flags])
    loaded = load_settings(settings)
    room = load(folder, DeviceLibrary(total=32 * MIB)).shape.total_pages
    left = room - loaded.model.shape.total_pages
    assert loaded.training_memory == reserved
    assert left == pytest.approx(reserved / page_bytes(folder), abs=4)


def test_asked_pages_are_used_if_they_fit(folder: Path) -> None:
    assert load(folder, DeviceLibrary(), pages=7).shape.total_pages == 7


def test_too_many_pages_are_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(DeviceError) as refused:
        load(folder, DeviceLibrary(total=16 * MIB), pages=100_000)
    text = str(refused.value)
    assert text.startswith(
        "--device: cuda:0 (Stand-in 1000, 16 MiB) has too little memory for blocks 0:4: 100000"
    )
    assert "the largest step 1 MiB" in text
    assert "allowed: fewer blocks, at most " in text


def test_step_that_leaves_no_room_is_refused(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r"1 pages of KV need .* but 0 B of 16 MiB are left"):
        load(folder, DeviceLibrary(total=16 * MIB, step=16 * MIB))


def test_weights_larger_than_the_device_are_not_read(folder: Path) -> None:
    with pytest.raises(
        DeviceError, match=r"their weights need .* and .* are usable \(.* are free\)"
    ):
        load(folder, DeviceLibrary(total=MIB, others=MIB - 1000))


def test_dense_blocks_of_a_sparse_model_count_as_they_are(tmp_path: Path) -> None:
    """The device is too small for four blocks with experts, and large enough for three without and one with them."""
    sizes = {"moe_intermediate_size": 1024, "n_routed_experts": 32, "first_k_dense_replace": 3}
    model = make_model(tmp_path, "deepseek_v3", shard_size="100MB", **sizes)
    facts = read_facts(model)
    counted = facts.weight_bytes(0, BLOCKS, "float32")
    library = DeviceLibrary(total=64 * MIB)
    assert counted < 0.9 * library.total < BLOCKS * 4 * facts.block_elements
    assert load(model, library).shape.total_pages > 0


def test_container_limits_the_pages_by_their_rows(folder: Path) -> None:
    """Retained rows are in the memory of the container."""
    free = load(folder, DeviceLibrary()).shape.total_pages
    limit = PROCESS_BYTES + 132 * MIB
    limited = load(folder, DeviceLibrary(), host_limit=limit).shape.total_pages
    assert 1 < limited < free


@pytest.mark.parametrize(
    ("device", "changes", "field"),
    [
        ("cuda", {"memory": 1 << 30}, "memory: sizes a server on the CPU"),
        ("cpu", {"memory_fraction": 0.5}, "memory_fraction: is of an accelerator"),
    ],
)
def test_size_of_the_other_kind_is_refused(
    folder: Path, device: str, changes: dict[str, Any], field: str
) -> None:
    options = SpanOptions(device=DeviceLibrary().open(device), **changes)
    with pytest.raises(UserError, match=field):
        load_span(folder, 0, BLOCKS, options)


def test_span_on_a_device_gives_the_same_tokens(folder: Path) -> None:
    plain, measured = Stream([1, 2, 3, 4, 5]), Stream([1, 2, 3, 4, 5])
    load_chain(folder, (0, BLOCKS)).generate([plain], 12)
    Chain([load(folder, DeviceLibrary(total=32 * MIB))]).generate([measured], 12)
    assert measured.log == plain.log


@pytest.mark.parametrize(
    ("name", "values"), [("lm_head.weight", "logits"), ("0.mlp.down_proj.weight", "outputs")]
)
def test_format_too_small_for_a_model_is_named(tmp_path: Path, name: str, values: str) -> None:
    """The self-check runs the blocks, and only the measured step the head."""
    make_model(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        scaled = {n: t * (1e6 if name in n else 1) for n, t in load_file(file).items()}
        save_file(scaled, file, {"format": "pt"})
    with pytest.raises(UserError) as refused:
        load(tmp_path, DeviceLibrary(total=32 * MIB), dtype="float16")
    assert str(refused.value) == (
        f"dtype: the model's {values} are not finite in float16; "
        "allowed: bfloat16 or float32 (spec.model.dtype)"
    )
    load(tmp_path, DeviceLibrary(total=32 * MIB), dtype="bfloat16")


@pytest.mark.parametrize("budget", [1, 32, 512])
@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 4), (0, 4)])
def test_largest_step_has_every_row_of_the_budget(first: int, last: int, budget: int) -> None:
    shape = ModelShape(first, last, 4, 64, page_size=4, total_pages=16, max_length=64, vocab_size=9)
    items = [item for item in largest_step(shape, budget) if isinstance(item, BatchItem)]
    assert sum(item.count for item in items) == budget + PREFILL_ROWS
    assert all(item.first + item.count == shape.max_length for item in items)
    assert any(item.sample is not None for item in items) == (last == 4)


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee docs")


class FullDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory that is enough for products of one row."""

    def __init__(self, fault: RuntimeError = FULL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault = fault

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::matmul", "aten::mm") and args[0].shape[0] > 1:
            raise self._fault
        return func(*args, **(kwargs or {}))


class FaultyDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device on which products fail."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::matmul":
            raise RuntimeError(FAULT)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def span_and_library(folder: Path) -> Iterator[tuple[TransformerSpan, DeviceLibrary]]:
    library = DeviceLibrary(total=32 * MIB)
    yield load(folder, library), library


def item(count: int) -> BatchItem:
    return BatchItem([0, 1], 0, count, (0, BLOCKS), [1] * count, None, count, None)


OTHER_FULL = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
]


@pytest.mark.parametrize("fault", [FULL, *map(RuntimeError, OTHER_FULL)])
def test_full_device_ends_the_step_and_frees_caches(
    fault: RuntimeError, span_and_library: tuple[TransformerSpan, DeviceLibrary]
) -> None:
    span, library = span_and_library
    before = library.freed
    with FullDevice(fault):
        with pytest.raises(OutOfDeviceMemory) as refused:
            span.step([item(5)])
        assert str(refused.value) == str(fault).partition("\n")[0]
        assert library.freed == before + 1
        assert span.step([item(1)])[0].error is None


@pytest.mark.parametrize("fault", [FULL, RuntimeError(OTHER_FULL[0])])
def test_full_device_ends_the_pass_and_frees_caches(
    fault: RuntimeError, span_and_library: tuple[TransformerSpan, DeviceLibrary]
) -> None:
    span, library = span_and_library
    task = PassTask((0, BLOCKS), (5,), 0, is_backward=False)
    running = span.start_pass(task, bytes(task.input_bytes(span.shape)))
    before = library.freed
    with FullDevice(fault), pytest.raises(OutOfDeviceMemory):
        running.advance()
    assert library.freed == before + 1


def test_full_device_while_loading_is_one_sentence(folder: Path) -> None:
    with FullDevice(RuntimeError(OTHER_FULL[0])), pytest.raises(DeviceError) as refused:
        load(folder, DeviceLibrary(total=32 * MIB))
    assert str(refused.value) == (
        "--device: cuda:0 (Stand-in 1000, 32 MiB) has too little memory for blocks 0:4: "
        f"{OTHER_FULL[0]}; allowed: fewer blocks, or a larger device"
    )


class SpanOnDevice:
    """A span that steps while its device is in this state; a mode counts in the thread that enters it."""

    grammars = None
    adapters = ()

    def __init__(self, span: TransformerSpan, state: Callable[[], TorchDispatchMode]) -> None:
        self._span, self._state = span, state
        self.shape, self.compute = span.shape, span.compute

    def prepare_thread(self) -> None:
        self._span.prepare_thread()

    def step(self, batch: Any) -> Any:
        with self._state():
            return self._span.step(batch)


def test_device_that_can_do_no_more_is_told_from_a_failed_step(
    span_and_library: tuple[TransformerSpan, DeviceLibrary],
) -> None:
    span, library = span_and_library
    with FaultyDevice():  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            span.step([item(5)])
        library.broken = FAULT
        with pytest.raises(DeviceError) as lost:
            span.step([item(5)])
    assert str(lost.value) == (
        "--device: cuda:0 can do no more: CUDA error: unspecified launch failure; "
        "needed: a new process, or another device"
    )


def test_step_that_reads_nothing_back_waits_for_the_device(
    span_and_library: tuple[TransformerSpan, DeviceLibrary],
) -> None:
    """Kernels run, and fail, after their launch: else in the time of the next step, of other sessions."""
    span, library = span_and_library
    library.broken = FAULT
    task = PassTask((0, BLOCKS), (5,), 0, is_backward=False)
    running = span.start_pass(task, bytes(task.input_bytes(span.shape)))
    with pytest.raises(DeviceError, match="can do no more"):
        span.step([item(5)])
    with pytest.raises(DeviceError, match="can do no more"):
        running.advance()


@contextlib.asynccontextmanager
async def node_of(
    model: SpanOnDevice, folder: Path
) -> AsyncIterator[tuple[asyncio.Task[None], FakeGateway]]:
    """Run a server of this model; yield its task, and a gateway that is linked to it."""
    flags = ["--discovery-dir", str(folder), "--name", "s0", "--blocks", "0:4", "--hash-model"]
    settings = parse_settings([*flags, "--hash-blocks", "4"])
    loaded = replace(load_settings(settings), model=cast("Any", model))
    node = Node(settings, loaded, Liveness(time.monotonic))
    running = asyncio.create_task(node.run())
    file = folder / "s0.json"
    async with asyncio.timeout(60):
        while not file.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server = ServerProcess(json.loads(file.read_text()), cast("Any", None), file)
        async with fake_gateway([server]) as gateway:
            yield running, gateway
    running.cancel()


async def test_lost_device_ends_the_server(
    tmp_path: Path, span_and_library: tuple[TransformerSpan, DeviceLibrary]
) -> None:
    """Else it would answer heartbeats for ever, and fail each step of the sessions that it holds."""
    span, library = span_and_library
    library.broken = FAULT
    async with node_of(SpanOnDevice(span, FaultyDevice), tmp_path) as (running, gateway):
        route = await gateway.open("one", 20)
        asking = asyncio.create_task(gateway.generate(route, [1, 2, 3]))
        with pytest.raises(DeviceError, match="can do no more"):
            await running
        asking.cancel()
    assert not (tmp_path / "s0.json").exists()


async def test_prompt_is_read_in_parts_on_a_full_device(
    tmp_path: Path, span_and_library: tuple[TransformerSpan, DeviceLibrary]
) -> None:
    span, library = span_and_library
    plain, before = Stream([1, 2, 3, 4, 5]), library.freed
    Chain([span]).generate([plain], 15)
    async with node_of(SpanOnDevice(span, FullDevice), tmp_path) as (_, gateway):
        route = await gateway.open("one", 20)
        assert await gateway.generate(route, [1, 2, 3, 4, 5]) == plain.log[5:]
    assert library.freed > before


class LostPass:
    """A pass whose device can do no more."""

    def advance(self) -> bool:
        raise DeviceError("--device: cuda:0 can do no more")

    def result(self) -> bytes:
        raise AssertionError("it never ends")


async def test_engine_reports_a_device_that_is_lost_in_a_pass(
    span_and_library: tuple[TransformerSpan, DeviceLibrary],
) -> None:
    done: asyncio.Queue[PartDone] = asyncio.Queue()
    engine = Engine(span_and_library[0], lambda _: None, done.put_nowait)
    engine.submit(LostPass())
    failed = await asyncio.wait_for(done.get(), 60)
    assert isinstance(failed.lost, DeviceError)


async def test_engine_reports_a_full_device(
    span_and_library: tuple[TransformerSpan, DeviceLibrary],
) -> None:
    done: asyncio.Queue[StepDone] = asyncio.Queue()
    engine = Engine(SpanOnDevice(span_and_library[0], FullDevice), done.put_nowait)
    engine.submit([item(5)])
    failed = await asyncio.wait_for(done.get(), 60)
    engine.submit([item(1)])
    passed = await asyncio.wait_for(done.get(), 60)
    assert failed.out_of_memory and "CUDA out of memory" in (failed.error or "")
    assert passed.error is None and not passed.out_of_memory
