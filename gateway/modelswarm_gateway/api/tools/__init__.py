"""Tools in requests and responses: definitions, choice, messages with calls, and OpenAI's deltas."""
