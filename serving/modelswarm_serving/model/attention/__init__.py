"""Paged attention, the KV cache and the layout of one packed step."""
