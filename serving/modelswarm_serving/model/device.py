"""The device on which a server computes: found by the flag `--device`, or refused with one sentence.

All calls of torch that know accelerators are in `TorchDrivers`; tests run everything else with a stand-in library. Used
by `startup.py` and by the span. Knows no model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from modelswarm.errors import DeviceError
from modelswarm.placement.dtype import BFLOAT16_CAPABILITY
from modelswarm.placement.quantity import human_bytes
from modelswarm.resources.accelerators import ANY_KIND
from modelswarm_serving.model.base import OutOfDeviceMemory

log = logging.getLogger(__name__)

CPU, CUDA = "cpu", "cuda"
_KINDS = (CUDA, "xpu")
"""Kinds of accelerators that are used. Others lack float64, which the sampler needs, or numbers of their memory."""
_NO_DRIVER = "Found no NVIDIA driver"
"""Start of torch's message on a machine without any driver, where `auto` means the CPU."""
_FULL = re.compile(
    # cudaGetErrorString and hipGetErrorString behind the prefix of torch's C10_CUDA_CHECK: pinned memory, launches.
    r"(CUDA|HIP) error: out of memory"
    # cuGetErrorString behind the prefix of C10_CUDA_DRIVER_CHECK.
    r"|CUDA driver error: out of memory"
    # TORCH_CUDABLAS_CHECK: cublasCreate allocates its workspace beside torch's allocator.
    r"|(CU|HIP)BLAS_STATUS_ALLOC_FAILED"
    # `gpuAssert` of Triton's driver.c, when it loads a kernel's module.
    r"|Triton Error \[(CUDA|HIP)\]: out of memory"
)
"""Texts of a full device in RuntimeErrors that are no torch.OutOfMemoryError."""
_BUSY = "busy or unavailable"
"""Part of CUDA's text (cudaErrorDevicesUnavailable) for a device in exclusive mode that another process uses."""
_NO_KERNEL = "no kernel image is available"
"""Part of CUDA's text (cudaErrorNoKernelImageForDevice) for a device that is too old or too new for this torch."""
_T = TypeVar("_T")


class Drivers(Protocol):
    """Questions to torch about the accelerators that this process sees; they are all of one kind."""

    def kind(self) -> str | None:
        """Return the type of accelerator that this build of torch supports; None: only the CPU."""
        ...

    def count(self) -> int:
        """Return the number of usable accelerators."""
        ...

    def fault(self, kind: str) -> str:
        """Return the driver's reason for having no device of this kind."""
        ...

    def device(self, kind: str, index: int) -> torch.device:
        """Return the device on which tensors are made."""
        ...

    def name(self, device: torch.device) -> str: ...

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        """Return the CUDA capability; None on other hardware."""
        ...

    def processors(self, device: torch.device) -> int:
        """Return the number of processors of a CUDA device."""
        ...

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Return free and total bytes of the device, over all processes."""
        ...

    def start_peak(self, device: torch.device) -> int:
        """Forget the peak, and return the bytes that this process has allocated."""
        ...

    def peak(self, device: torch.device) -> int:
        """Return the most bytes that this process had allocated since `start_peak`."""
        ...

    def free_caches(self) -> None:
        """Return unused memory of torch's allocator to the device."""
        ...

    def wait(self, device: torch.device) -> None:
        """Wait for all work of the device; RuntimeError if it can do no more."""
        ...


class TorchDrivers:
    """The drivers of this machine, through torch."""

    def kind(self) -> str | None:
        found = torch.accelerator.current_accelerator()
        return None if found is None else found.type

    def count(self) -> int:
        return torch.accelerator.device_count() if torch.accelerator.is_available() else 0

    def fault(self, kind: str) -> str:
        try:
            torch.zeros(1, device=kind)
        except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built without it
            return str(error)
        return "the driver shows no device"

    def device(self, kind: str, index: int) -> torch.device:
        return torch.device(kind, index)

    def name(self, device: torch.device) -> str:
        return str(torch.get_device_module(device).get_device_name(device))

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return None
        return torch.cuda.get_device_capability(device)

    def processors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def memory(self, device: torch.device) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(device)

    def start_peak(self, device: torch.device) -> int:
        torch.accelerator.reset_peak_memory_stats(device)
        return torch.accelerator.memory_allocated(device)

    def peak(self, device: torch.device) -> int:
        return torch.accelerator.max_memory_allocated(device)

    def free_caches(self) -> None:
        torch.accelerator.empty_cache()

    def wait(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this process; tensors are made on `torch`."""

    name: str  # as `--device` takes it, such as cuda:0
    torch: torch.device
    drivers: Drivers

    @property
    def kind(self) -> str:
        """The name without the number."""
        return self.name.partition(":")[0]

    @property
    def is_cpu(self) -> bool:
        return self.kind == CPU

    def __str__(self) -> str:
        if self.is_cpu:
            return self.name
        total = self.drivers.memory(self.torch)[1]
        return f"{self.name} ({self.drivers.name(self.torch)}, {human_bytes(total)})"

    def free_caches(self) -> None:
        if not self.is_cpu:
            self.drivers.free_caches()

    def wait(self) -> None:
        """Wait for all work of the device; RuntimeError if a part of it failed."""
        if not self.is_cpu:
            self.drivers.wait(self.torch)

    def check_alive(self) -> None:
        """Raise DeviceError if the device can do no more, as after most of its faults until the process ends."""
        try:
            self.wait()
        except RuntimeError as error:
            reason = first_sentence(str(error).partition("\n")[0])
            raise DeviceError(
                f"--device: {self.name} can do no more: {reason}; needed: a new process, or another device"
            ) from error


HOST = Device(CPU, torch.device(CPU), TorchDrivers())
"""The CPU."""


def find_device(wanted: str, drivers: Drivers) -> Device:
    """Return the device that a flag names; DeviceError if this process does not see it.

    `wanted`: auto, cpu, accelerator (of any kind), or a kind with or without a number, such as cuda:1.
    """
    kind, count = drivers.kind(), drivers.count()
    if kind not in _KINDS:
        kind, count = None, 0
    cpu = Device(CPU, torch.device(CPU), drivers)
    if wanted == CPU:
        return cpu
    if wanted == "auto" and (kind is None or not count):
        reason = "" if kind is None else first_sentence(drivers.fault(kind))
        if reason and not reason.startswith(_NO_DRIVER):
            log.warning("no accelerator is usable, so the CPU computes: %s", reason)
        return cpu
    asked, _, number = wanted.partition(":")
    if asked in ("auto", ANY_KIND):
        asked = kind or ANY_KIND
    if kind != asked or not count:
        raise DeviceError(
            f"--device: {wanted} is not there: {_absence(asked, kind, drivers)}; {_ALLOWED}"
        )
    index = int(number or 0)
    if index >= count:
        seen = f"{kind}:0" if count == 1 else f"{kind}:0 to {kind}:{count - 1}"
        raise DeviceError(f"--device: {wanted} does not exist; allowed: {seen}")
    return Device(f"{kind}:{index}", drivers.device(kind, index), drivers)


_ALLOWED = "allowed: auto or cpu, or a machine, driver and pod with that device"


def _absence(asked: str, kind: str | None, drivers: Drivers) -> str:
    if kind is None:
        return f"this build of torch supports neither {' nor '.join(_KINDS)}"
    if asked != kind:
        return f"this build of torch computes on {kind} and on the CPU"
    return first_sentence(drivers.fault(kind))


def first_sentence(message: str) -> str:
    """Return the first sentence of a library, which has the cause and a driver's version; the rest is advice."""
    text = " ".join(message.split())
    return re.split(r"(?<=[a-z)])\. ", text, maxsplit=1)[0].rstrip(".")


def memory_fault(error: RuntimeError) -> str | None:
    """Return the first line of an error that means that the device is full; None for any other."""
    text = str(error).partition("\n")[0]
    is_full = isinstance(error, torch.OutOfMemoryError) or _FULL.search(text) is not None
    return text if is_full else None


def run_on(device: Device, work: Callable[[], _T]) -> _T:
    """Return the result of the work once it is done; OutOfDeviceMemory if the device has too little memory for it.

    DeviceError if the device can do no more. Some work reads nothing back, such as a chunk of a prompt at the tail. It
    would run, and fail, in the time of the next step, which then looked slow.
    """
    try:
        result = work()
        device.wait()
        return result
    except RuntimeError as error:
        fault = memory_fault(error)
        if fault is None:
            device.check_alive()
            raise
    device.free_caches()  # not before the exception is gone, whose frames hold the tensors of the work
    raise OutOfDeviceMemory(fault)


def fault_text(error: Exception) -> str:
    """Return the first sentence of a fault in a library; a compiler's own text is a listing, so its cause."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {first_sentence(str(cause))}"


def check_dtype(device: Device, dtype: torch.dtype) -> None:
    """Raise DeviceError if the device cannot compute in this format or in float64, or only by emulation."""
    name = str(dtype).removeprefix("torch.")
    capability = None if device.is_cpu else device.drivers.capability(device.torch)
    if dtype is torch.bfloat16 and capability is not None and capability[0] < BFLOAT16_CAPABILITY:
        raise DeviceError(
            f"--dtype: {device.name} cannot compute in bfloat16: its capability is {capability[0]}.{capability[1]}, "
            f"needed is {BFLOAT16_CAPABILITY}.0; allowed: float16 or float32 (spec.model.dtype)"
        )
    try:
        rows = torch.ones(1, 1, 4, 16, dtype=dtype, device=device.torch)
        F.scaled_dot_product_attention(rows @ rows.mT @ rows, rows, rows)
    except RuntimeError as error:
        raise _refusal(device, name, error) from error
    try:
        torch.ones(4, dtype=torch.float64, device=device.torch).log()
    except RuntimeError as error:
        reason = first_sentence(str(error))
        raise DeviceError(
            f"--device: {device.name} has no float64, which the sampler needs: {reason}; allowed: cpu, or another "
            "device"
        ) from error


def _refusal(device: Device, dtype: str, error: RuntimeError) -> DeviceError:
    """Return the error of a device that failed its first work.

    It is named without its memory: that question fails on such a device, too.
    """
    reason = first_sentence(str(error).partition("\n")[0])
    if memory_fault(error) is not None or _BUSY in reason:
        return DeviceError(
            f"--device: {device.name} is taken by other processes: {reason}; allowed: another device, or this one "
            "once they have ended"
        )
    if _NO_KERNEL in reason:
        return DeviceError(
            f"--device: {device.name} is not one for which this build of torch {torch.__version__} has code: {reason}; "
            "allowed: a newer device, another build of torch, or cpu"
        )
    return DeviceError(f"--dtype: {device.name} cannot compute in {dtype}: {reason}")
