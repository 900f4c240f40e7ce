"""Errors of a pipeline, beside those of the client's API."""

from __future__ import annotations

from typing import Any

from modelswarm.client.pipeline.response import Response
from modelswarm.errors import ModelSwarmError


class AnswerAbortedError(ModelSwarmError):
    """Answers were ended before they were complete: by `abort` of their session, or by `close`."""


class PipelineInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a run. `responses` has the answers that are done, in the order of the prompts, else None.

    The same call with `done=error.responses` goes on from there.
    """

    def __init__(self, responses: list[Response | None]) -> None:
        done = sum(response is not None for response in responses)
        advice = "; call again with done=error.responses to go on" if done else ""
        super().__init__(f"interrupted: {done} of {len(responses)} prompts are done{advice}")
        self.responses = responses

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the responses, which the constructor takes."""
        return type(self), (self.responses,)
