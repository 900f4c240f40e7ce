"""OpenAI's `/v1/responses`: a translation onto the generation that chat completions use."""
