"""ModelSwarm: one large model served by many small pods, and no stream lost when a pod dies.

The names of the Python library are imported when they are used: processes that need none of them start faster.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelswarm.client.api import AsyncClient, Client
    from modelswarm.client.engine.engine import Engine
    from modelswarm.client.engine.session import InferenceSession
    from modelswarm.client.hf.auto import (
        AutoDistributedModelForCausalLM,
        DistributedBloomForCausalLM,
        DistributedCohere2ForCausalLM,
        DistributedDeepseekV2ForCausalLM,
        DistributedDeepseekV3ForCausalLM,
        DistributedFalconForCausalLM,
        DistributedGemma2ForCausalLM,
        DistributedGemma3ForCausalLM,
        DistributedGemma3ForConditionalGeneration,
        DistributedGlm4ForCausalLM,
        DistributedGPT2LMHeadModel,
        DistributedGPTNeoXForCausalLM,
        DistributedGptOssForCausalLM,
        DistributedGraniteForCausalLM,
        DistributedLlamaForCausalLM,
        DistributedMistralForCausalLM,
        DistributedMixtralForCausalLM,
        DistributedOlmo2ForCausalLM,
        DistributedOPTForCausalLM,
        DistributedPhi3ForCausalLM,
        DistributedQwen2ForCausalLM,
        DistributedQwen2MoeForCausalLM,
        DistributedQwen3ForCausalLM,
        DistributedQwen3MoeForCausalLM,
        DistributedStarcoder2ForCausalLM,
    )
    from modelswarm.client.pipeline import (
        GenerationConfig,
        Pipeline,
        PipelineInterrupted,
        Response,
        pipeline,
    )

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AutoDistributedModelForCausalLM",
    "Client",
    "DistributedBloomForCausalLM",
    "DistributedCohere2ForCausalLM",
    "DistributedDeepseekV2ForCausalLM",
    "DistributedDeepseekV3ForCausalLM",
    "DistributedFalconForCausalLM",
    "DistributedGPT2LMHeadModel",
    "DistributedGPTNeoXForCausalLM",
    "DistributedGemma2ForCausalLM",
    "DistributedGemma3ForCausalLM",
    "DistributedGemma3ForConditionalGeneration",
    "DistributedGlm4ForCausalLM",
    "DistributedGptOssForCausalLM",
    "DistributedGraniteForCausalLM",
    "DistributedLlamaForCausalLM",
    "DistributedMistralForCausalLM",
    "DistributedMixtralForCausalLM",
    "DistributedOPTForCausalLM",
    "DistributedOlmo2ForCausalLM",
    "DistributedPhi3ForCausalLM",
    "DistributedQwen2ForCausalLM",
    "DistributedQwen2MoeForCausalLM",
    "DistributedQwen3ForCausalLM",
    "DistributedQwen3MoeForCausalLM",
    "DistributedStarcoder2ForCausalLM",
    "Engine",
    "GenerationConfig",
    "InferenceSession",
    "Pipeline",
    "PipelineInterrupted",
    "Response",
    "__version__",
    "pipeline",
]

_MODULES = {
    "AsyncClient": "modelswarm.client.api",
    "Client": "modelswarm.client.api",
    "Engine": "modelswarm.client.engine.engine",
    "GenerationConfig": "modelswarm.client.pipeline",
    "InferenceSession": "modelswarm.client.engine.session",
    "Pipeline": "modelswarm.client.pipeline",
    "PipelineInterrupted": "modelswarm.client.pipeline",
    "Response": "modelswarm.client.pipeline",
    "pipeline": "modelswarm.client.pipeline",
}


def __getattr__(name: str) -> Any:
    if name.startswith(("AutoDistributed", "Distributed", "Remote")):  # also refuses Petals' others
        return getattr(importlib.import_module("modelswarm.client.hf"), name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
