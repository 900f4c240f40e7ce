"""Passes through blocks as calls: their admission by memory, and their turns at the engine."""
