"""A device library without a device: what `Drivers` asks of torch, answered from numbers; tensors are on the CPU.

The memory in use is real: the bytes of all tensors that this process has made since.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from modelswarm_serving.model.device import Device, find_device


def tensor_bytes() -> int:
    """Return the bytes of all tensors of this process; each storage counts once."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@dataclass
class DeviceLibrary:
    devices: int = 1
    total: int = 1 << 30  # bytes of each
    others: int = 0  # bytes that the driver and other processes use
    step: int = 1 << 20  # bytes that any step takes beside weights and KV
    accelerator: str | None = "cuda"
    compute_capability: tuple[int, int] | None = (9, 0)
    processor_count: int = 132
    reason: str = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
    freed: int = 0  # calls of free_caches
    broken: str = ""  # the driver's refusal of all work; empty: it works
    _at_start: int = 0  # bytes of tensors at the start of the peak
    _before: int = 0  # bytes of tensors that were there before the device was opened

    def kind(self) -> str | None:
        return self.accelerator

    def count(self) -> int:
        return self.devices

    def fault(self, kind: str) -> str:
        return self.reason

    def device(self, kind: str, index: int) -> torch.device:
        return torch.device("cpu")

    def name(self, device: torch.device) -> str:
        return "Stand-in 1000"

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        return self.compute_capability

    def processors(self, device: torch.device) -> int:
        return self.processor_count

    def memory(self, device: torch.device) -> tuple[int, int]:
        used = self.others + max(0, tensor_bytes() - self._before)
        return max(0, self.total - used), self.total

    def start_peak(self, device: torch.device) -> int:
        self._at_start = max(0, tensor_bytes() - self._before)
        return self._at_start

    def peak(self, device: torch.device) -> int:
        return self._at_start + self.step

    def free_caches(self) -> None:
        self.freed += 1

    def wait(self, device: torch.device) -> None:
        if self.broken:
            raise RuntimeError(self.broken)

    def open(self, name: str = "cuda") -> Device:
        self._before = tensor_bytes()
        return find_device(name, self)
