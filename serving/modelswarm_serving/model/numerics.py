"""The numerics class of a server: a name for the kernels that compute its rows.

`cpu-amd-avx512_bf16/torch-2.15.0/float32` or `cuda-9.0-132/torch-2.15.0/bfloat16/triton`: device, torch and number
format. A measured layout of weights follows, or the attention backend of a device, and variables by which libraries
take other kernels. Of a CUDA device the number of processors counts: keys are cut into as many parts as fill it.
The class is announced in the Hello.
Two servers of one class may still differ in the last bits, for example with other batches; two classes mostly do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from modelswarm.process.control_groups import ROOT
from modelswarm.process.cpu_features import cpu_kernels
from modelswarm_serving.model.device import Device

_CPU_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
)
"""Variables that limit the instructions of torch, oneDNN or MKL.

On one AMD EPYC the first and MKL_CBWR changed bits of float32, the two of oneDNN bits of bfloat16.
MKL_ENABLE_INSTRUCTIONS changed none; MKL documents it for Intel's.
"""
_CUDA_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_MAX_VALUE = 32  # characters of a variable's value
_FOREIGN = re.compile(r"[^A-Za-z0-9_.+-]")


def numerics_class(
    device: Device,
    dtype: str,
    environment: Mapping[str, str] = os.environ,
    root: Path = ROOT,
    layout: str = "",
    attention: str = "",
) -> str:
    """Return the numerics class of a server that computes on `device`; empty: unknown.

    `layout`: of the weights, if it is not the transposed one. `attention`: the backend of a device.
    """
    hardware = _hardware(device, root)
    if not hardware:
        return ""
    variables = _CPU_VARIABLES if device.is_cpu else _CUDA_VARIABLES
    given = [f"{name}={_plain(environment[name])}" for name in variables if environment.get(name)]
    kernels = [name for name in (layout, attention) if name]
    return "/".join([hardware, f"torch-{_plain(torch.__version__)}", dtype, *kernels, *given])


def _hardware(device: Device, root: Path) -> str:
    if device.is_cpu:
        kernels = cpu_kernels(root)
        return kernels and f"cpu-{_plain(kernels)}"
    capability = device.drivers.capability(device.torch)
    if capability is not None:
        return f"cuda-{capability[0]}.{capability[1]}-{device.drivers.processors(device.torch)}"
    return f"{device.kind}-{_plain(device.drivers.name(device.torch))}"


def _plain(text: str) -> str:
    """Return the text as a Hello may have it."""
    return _FOREIGN.sub("_", text)[:_MAX_VALUE]
