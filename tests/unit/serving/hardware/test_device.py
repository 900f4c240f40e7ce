"""The device of a server: found by its flag, or refused with one sentence; and its numerics class."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from support.models.device_library import DeviceLibrary
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from modelswarm.errors import DeviceError
from modelswarm.process.cpu_features import cpu_kernels
from modelswarm.protocol.link.hello_checks import hello_fault
from modelswarm.protocol.messages import Hello, Lane, Role
from modelswarm_serving.model.device import HOST, TorchDrivers, check_dtype, find_device
from modelswarm_serving.model.numerics import numerics_class
from modelswarm_serving.settings import parse_settings

SERVER = ["--name", "s0", "--model", "demo://counting", "--blocks", "0:4"]
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com"
)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("auto", "cuda:0"),
        ("accelerator", "cuda:0"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("cpu", "cpu"),
    ],
)
def test_device_flag_finds_the_device(wanted: str, found: str) -> None:
    assert find_device(wanted, DeviceLibrary(devices=2)).name == found


@pytest.mark.parametrize(
    "library",
    [DeviceLibrary(devices=0), DeviceLibrary(accelerator=None), DeviceLibrary(accelerator="mps")],
)
def test_auto_without_accelerator_is_the_cpu(library: DeviceLibrary) -> None:
    assert find_device("auto", library).is_cpu


@pytest.mark.parametrize(
    ("wanted", "library", "reason"),
    [
        (
            "cuda",
            DeviceLibrary(devices=0),
            "cuda is not there: Found no NVIDIA driver on your system",
        ),
        ("cuda:3", DeviceLibrary(devices=0), "cuda:3 is not there: Found no NVIDIA driver"),
        (
            "cuda",
            DeviceLibrary(devices=0, reason=OLD_DRIVER),
            "cuda is not there: The NVIDIA driver on your system is too old (found version 11040); allowed: ",
        ),
        (
            "cuda",
            DeviceLibrary(accelerator=None),
            "cuda is not there: this build of torch supports neither cuda nor xpu; ",
        ),
        (
            "accelerator",
            DeviceLibrary(accelerator=None),
            "accelerator is not there: this build of torch supports neither cuda nor xpu; ",
        ),
        ("xpu", DeviceLibrary(), "this build of torch computes on cuda and on the CPU; "),
        ("cuda:1", DeviceLibrary(), "cuda:1 does not exist; allowed: cuda:0"),
        ("cuda:7", DeviceLibrary(devices=4), "cuda:7 does not exist; allowed: cuda:0 to cuda:3"),
    ],
)
def test_missing_device_is_one_sentence(wanted: str, library: DeviceLibrary, reason: str) -> None:
    with pytest.raises(DeviceError) as refused:
        find_device(wanted, library)
    assert str(refused.value).startswith("--device: ")
    assert reason in str(refused.value)
    assert "http" not in str(refused.value)


def test_auto_logs_a_driver_that_is_not_usable(caplog: pytest.LogCaptureFixture) -> None:
    assert find_device("auto", DeviceLibrary(devices=0, reason=OLD_DRIVER)).is_cpu
    assert "so the CPU computes: The NVIDIA driver on your system is too old" in caplog.text


def test_auto_without_any_driver_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        find_device("auto", DeviceLibrary(devices=0))
    assert not caplog.records


def test_device_names_its_model_and_memory() -> None:
    assert str(DeviceLibrary(total=80 << 30).open()) == "cuda:0 (Stand-in 1000, 80 GiB)"
    assert str(HOST) == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpu_computes_in_every_dtype(dtype: torch.dtype) -> None:
    check_dtype(HOST, dtype)
    assert HOST.is_cpu


def test_bfloat16_needs_capability_8() -> None:
    device = DeviceLibrary(compute_capability=(7, 5)).open()
    check_dtype(device, torch.float16)
    check_dtype(DeviceLibrary(compute_capability=(8, 0)).open(), torch.bfloat16)
    with pytest.raises(DeviceError, match=r"bfloat16: its capability is 7\.5, needed is 8\.0"):
        check_dtype(device, torch.bfloat16)


def test_dtype_that_torch_cannot_multiply_is_refused() -> None:
    with pytest.raises(DeviceError, match="--dtype: cpu cannot compute in float8_e4m3fn: "):
        check_dtype(HOST, torch.float8_e4m3fn)


class FaultyDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A device that cannot make tensors of one format, or of any."""

    def __init__(self, fault: str, dtype: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault, self._dtype = fault, dtype

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._dtype is None or (kwargs or {}).get("dtype") is self._dtype:
            raise RuntimeError(self._fault)
        return func(*args, **(kwargs or {}))


def test_device_without_float64_is_refused() -> None:
    """As some GPUs of Intel."""
    device = DeviceLibrary(accelerator="xpu", compute_capability=None).open("xpu")
    fault = "Required aspect fp64 is not supported on the device"
    with FaultyDevice(fault, torch.float64), pytest.raises(DeviceError) as refused:
        check_dtype(device, torch.float16)
    assert str(refused.value) == (
        f"--device: xpu:0 has no float64, which the sampler needs: {fault}; allowed: cpu, or another device"
    )


class TakenDevice(DeviceLibrary):
    """A device on which this process has no context."""

    @override
    def memory(self, device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
            "--device: cuda:0 is taken by other processes: CUDA error: out of memory; allowed: ",
        ),
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for it in",
            "--device: cuda:0 is taken by other processes: CUDA error: CUDA-capable device(s) is/are busy or",
        ),
        (
            "CUDA error: no kernel image is available for execution on the device\nSearch for",
            "--device: cuda:0 is not one for which this build of torch ",
        ),
        (
            "Got unsupported ScalarType BFloat16",
            "--dtype: cuda:0 cannot compute in bfloat16: Got unsupported ScalarType BFloat16",
        ),
    ],
)
def test_device_that_fails_its_first_work_tells_why(fault: str, sentence: str) -> None:
    with FaultyDevice(fault), pytest.raises(DeviceError) as refused:
        check_dtype(TakenDevice().open(), torch.bfloat16)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 4


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_torch_without_device_tells_the_reason() -> None:
    drivers = TorchDrivers()
    assert drivers.count() == 0
    assert drivers.fault("cuda")
    assert find_device("auto", drivers).is_cpu
    with pytest.raises(DeviceError, match="--device: cuda is not there: "):
        find_device("cuda", drivers)


@pytest.mark.parametrize("flag", ["auto", "cpu", "accelerator", "cuda", "cuda:1", "xpu"])
def test_device_flag_takes_kinds_and_numbers(flag: str) -> None:
    assert parse_settings([*SERVER, "--device", flag]).device == flag


@pytest.mark.parametrize("flag", ["gpu", "mps", "cuda:", "cuda:x", "cpu:0", "auto:1", ""])
def test_unknown_device_flag_is_refused(flag: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a device; allowed: auto, cpu, accel"):
        parse_settings([*SERVER, "--device", flag])


def cpu_root(folder: Path, *cpus: str, vendor: str = "vendor_id\t: GenuineIntel") -> Path:
    """Return a root folder with a cpuinfo of these features, one text for each CPU."""
    (folder / "proc").mkdir()
    name = "Features" if "implementer" in vendor else "flags"
    text = "\n".join(f"{vendor}\n{name}\t\t: {features}\n" for features in cpus)
    (folder / "proc/cpuinfo").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("cpus", "vendor", "kernels"),
    [
        (["fpu avx avx2 fma"], "vendor_id\t: GenuineIntel", "intel-avx2"),
        (
            ["avx2 avx512bw avx512_vnni", "avx2 avx512bw"],
            "vendor_id\t: AuthenticAMD",
            "amd-avx512bw",
        ),
        (["avx2 avx512bw avx512_bf16"], "vendor_id\t: AuthenticAMD", "amd-avx512_bf16"),
        (["avx2 avx512_fp16 amx_bf16"], "vendor_id\t: GenuineIntel", "intel-amx_bf16"),
        (["avx2"], "vendor_id\t: CentaurHauls", "CentaurHauls-avx2"),
        (["fp asimd sve bf16"], "CPU implementer\t: 0x41", "0x41-sve"),
        (["fpu sse2"], "vendor_id\t: GenuineIntel", ""),
        (["avx2"], "", ""),
        ([], "", ""),
    ],
)
def test_kernels_follow_vendor_and_widest_common_extension(
    tmp_path: Path, cpus: list[str], vendor: str, kernels: str
) -> None:
    assert cpu_kernels(cpu_root(tmp_path, *cpus, vendor=vendor)) == kernels


def test_cpu_class_names_isa_torch_dtype_and_limits(tmp_path: Path) -> None:
    root = cpu_root(tmp_path, "avx avx2 avx512bw")
    plain = f"cpu-intel-avx512bw/torch-{torch.__version__}/float32"
    assert numerics_class(HOST, "float32", {"PATH": "/bin", "MKL_CBWR": ""}, root) == plain
    limits = {"ONEDNN_MAX_CPU_ISA": "avx2 ;", "ATEN_CPU_CAPABILITY": "a" * 99}
    limited = numerics_class(HOST, "float32", limits | {"NVIDIA_TF32_OVERRIDE": "0"}, root)
    assert limited == f"{plain}/ATEN_CPU_CAPABILITY={'a' * 32}/ONEDNN_MAX_CPU_ISA=avx2__"
    hello = Hello((2, 2), "s/1/a", Role.SERVER, "", Lane.LIVE, numerics=limited)
    assert hello_fault(hello) == ""


def test_unknown_cpu_has_no_class(tmp_path: Path) -> None:
    assert numerics_class(HOST, "float32", {}, cpu_root(tmp_path)) == ""


def test_device_class_names_capability_or_device() -> None:
    rest = f"/torch-{torch.__version__}/bfloat16"
    cuda = DeviceLibrary(compute_capability=(9, 0)).open()
    assert numerics_class(cuda, "bfloat16", {"MKL_CBWR": "AVX2"}) == f"cuda-9.0-132{rest}"
    tf32 = {"NVIDIA_TF32_OVERRIDE": "0"}
    assert numerics_class(cuda, "bfloat16", tf32) == f"cuda-9.0-132{rest}/NVIDIA_TF32_OVERRIDE=0"
    other = DeviceLibrary(accelerator="xpu", compute_capability=None).open("xpu")
    assert numerics_class(other, "bfloat16", {}) == f"xpu-Stand-in_1000{rest}"


def test_devices_that_cut_keys_otherwise_have_two_classes() -> None:
    """An L4 and an RTX 4090 have capability 8.9, and 58 and 128 processors."""
    small, large = (
        DeviceLibrary(compute_capability=(8, 9), processor_count=count).open()
        for count in (58, 128)
    )
    assert numerics_class(small, "bfloat16", {}) != numerics_class(large, "bfloat16", {})


def test_attention_backends_have_two_classes() -> None:
    cuda, limits = DeviceLibrary().open(), {"NVIDIA_TF32_OVERRIDE": "0"}
    classes = [
        numerics_class(cuda, "bfloat16", limits, attention=name) for name in ("triton", "sdpa")
    ]
    rest = f"cuda-9.0-132/torch-{torch.__version__}/bfloat16"
    assert classes == [f"{rest}/{name}/NVIDIA_TF32_OVERRIDE=0" for name in ("triton", "sdpa")]
