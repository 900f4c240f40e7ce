"""Structured output at the gateway: request fields become one checked llguidance grammar."""
