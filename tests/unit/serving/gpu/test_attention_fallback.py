"""A fault of Triton or of a capture at start: the server attends by the reference, or ends with one sentence.

The device library is a stand-in, so Triton finds no driver for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.device_library import DeviceLibrary
from support.models.tiny_models import make_model

from modelswarm.checkpoint.tensor_names import ModelPart
from modelswarm.errors import DeviceError, UserError
from modelswarm_serving.app import span_options
from modelswarm_serving.model.attention.attention import SDPA, SdpaBackend
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.attention.selection import choose_backend
from modelswarm_serving.model.attention.step_layout import RowLayout, StepLayout
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.model.transformer.fusion import FusedBlocks
from modelswarm_serving.model.transformer.loading import load_modules
from modelswarm_serving.model.transformer.span import TransformerSpan
from modelswarm_serving.model.transformer.startup import SpanOptions, capture_decode, load_span
from modelswarm_serving.settings import parse_settings

BLOCKS = 2
CPU = torch.device("cpu")
SERVER = ["--name", "s0", "--model", "demo://counting", "--blocks", "0:4", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), blocks=BLOCKS)


def load(folder: Path, library: DeviceLibrary, **changes: Any) -> TransformerSpan:
    options = SpanOptions(
        threads=1, page_size=4, max_length=64, token_budget=32, device=library.open(), **changes
    )
    return load_span(folder, 0, BLOCKS, options)


def test_fault_of_triton_at_start_gives_the_reference(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    span = load(folder, DeviceLibrary())
    assert (span.compute.attention, span.compute.decode_graphs) == ("sdpa", False)
    assert span.compute.numerics.endswith("/float32/sdpa")
    (warning,) = caplog.messages
    assert warning.startswith("attention on cuda:0 (Stand-in 1000, 1 GiB) runs over gathered pages")


def test_fault_of_a_named_backend_is_a_sentence(folder: Path) -> None:
    with pytest.raises(DeviceError) as refused:
        load(folder, DeviceLibrary(), attention_backend="triton")
    text = str(refused.value)
    assert text.startswith(
        "--attention-backend: triton cannot run on cuda:0 (Stand-in 1000, 1 GiB)"
    )
    assert text.endswith("; allowed here: auto or sdpa")
    assert "\n" not in text


def test_device_that_died_in_the_check_is_no_fallback(folder: Path) -> None:
    with pytest.raises(DeviceError, match="can do no more: CUDA error"):
        load(folder, DeviceLibrary(broken="CUDA error: an illegal memory access"))


def test_device_before_ampere_gets_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    cache = KvCache(KvCacheShape(1, 1, 4, 1, 64), torch.float16, CPU)
    old = DeviceLibrary(compute_capability=(7, 5)).open()
    assert choose_backend("auto", cache, old) is SDPA
    assert "the capability is 7.5, and Triton needs 8.0" in caplog.text
    with pytest.raises(DeviceError, match=r"triton cannot run on cuda:0 .* capability is 7\.5"):
        choose_backend("triton", cache, old)


class FaultyGraphs(SdpaBackend):
    """A backend whose static buffers cannot be made."""

    def __init__(self, fault: Exception) -> None:
        self._fault = fault

    def init_graphs(self, rows: int, positions: int) -> None:
        raise self._fault

    def prepare_for_capture(self, rows: int) -> RowLayout:
        raise self._fault

    def prepare_for_replay(self, layout: StepLayout, rows: int) -> None:
        raise self._fault


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("CUDA error: operation not permitted when stream is capturing\nsee docs"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_failed_capture_leaves_decode_eager(
    folder: Path, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        loaded = load_modules(folder, ModelPart(0, BLOCKS, BLOCKS), torch.float32, CPU)
        blocks = FusedBlocks(loaded.body, torch.float32)
    cache = KvCache(KvCacheShape(BLOCKS, 8, 4, 2, 16), torch.float32, CPU)
    shape = ModelShape(0, BLOCKS, BLOCKS, 64, 4, 8, max_length=32, vocab_size=9)
    rows, library = torch.zeros(4, 64), DeviceLibrary()

    def capture(**changes: Any) -> object:
        options = SpanOptions(device=library.open(), **changes)
        backend = FaultyGraphs(fault)
        return capture_decode(blocks, rows, rows, cache, backend, shape, folder, options)

    assert capture(enforce_eager=True) is None
    assert not caplog.messages
    assert capture() is None
    (warning,) = caplog.messages
    assert warning.startswith("decode steps on cuda:0 (Stand-in 1000, 1 GiB) are not captured")
    assert type(fault).__name__ in warning
    library.broken = "CUDA error: an illegal memory access"
    with pytest.raises(DeviceError, match="can do no more"):
        capture()


@pytest.mark.parametrize(("device", "backend"), [("cpu", "auto"), ("cuda", "sdpa")])
def test_eager_mode_without_captures_is_refused(folder: Path, device: str, backend: str) -> None:
    options = SpanOptions(device=DeviceLibrary().open(device), attention_backend=backend)
    with pytest.raises(UserError, match="enforce_eager: has an effect on CUDA"):
        load_span(folder, 0, BLOCKS, replace(options, enforce_eager=True))


def test_flags_of_attention_reach_the_span() -> None:
    plain = span_options(parse_settings(SERVER), None)
    assert (plain.attention_backend, plain.enforce_eager) == ("auto", False)
    flags = ["--attention-backend", "sdpa", "--enforce-eager"]
    chosen = span_options(parse_settings([*SERVER, *flags]), None)
    assert (chosen.attention_backend, chosen.enforce_eager) == ("sdpa", True)
