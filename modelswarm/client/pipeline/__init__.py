"""`pipeline`: many prompts at once, with LMDeploy's verbs and fields. See docs/reference/from-lmdeploy.md."""

from modelswarm.client.pipeline.errors import AnswerAbortedError, PipelineInterrupted
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.opening import pipeline
from modelswarm.client.pipeline.response import Response
from modelswarm.client.pipeline.response_stream import ResponseStream
from modelswarm.client.pipeline.session import Session
from modelswarm.client.pipeline.synchronous import Pipeline

__all__ = [
    "AnswerAbortedError",
    "GenerationConfig",
    "Pipeline",
    "PipelineInterrupted",
    "Response",
    "ResponseStream",
    "Session",
    "pipeline",
]
