"""Anthropic's Messages API: requests, responses, stream events and errors, over the same service as OpenAI's."""
