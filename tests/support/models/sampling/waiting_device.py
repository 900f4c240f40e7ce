"""A device without a device: its tensors are on the host, their operations count those for which the host would wait.

Tensors name the device `meta`, because torch asks a driver before operations of any other. Knows no pinned memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}
"""Operations whose result the host needs at once."""


class DeviceTensor(Tensor):
    """A tensor on the device; `host_values` has its values on the host."""

    host_values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        device = torch.device("meta")
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=device
        )
        made.host_values = values
        return made

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func.name()} outside of WaitingDevice")


class WaitingDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on DeviceTensors; `waits` has the names of those for which the host waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.name(), dict(kwargs or {})
        options.pop("pin_memory", None)
        if name == "aten::is_pinned":
            return True
        device = options.get("device")
        if device is not None:
            options["device"] = torch.device("cpu")
        is_used = any(isinstance(each, DeviceTensor) for each in tree_leaves((args, options)))
        on_host = device is not None and torch.device(device).type == "cpu"
        into_host = name == "aten::copy_" and not isinstance(args[0], DeviceTensor)
        is_wait = is_used and (on_host or into_host or name in _READS)
        if is_wait:
            self.waits.append(name)
        made = func(*tree_map(_values, args), **tree_map(_values, options))
        if func._schema.is_mutable:
            return args[0]
        is_made = (is_used and not is_wait) or (device is not None and not on_host)
        return tree_map(_on_device, made) if is_made else made


def _values(each: Any) -> Any:
    return each.host_values if isinstance(each, DeviceTensor) else each


def _on_device(each: Any) -> Any:
    return DeviceTensor(each) if isinstance(each, Tensor) else each
