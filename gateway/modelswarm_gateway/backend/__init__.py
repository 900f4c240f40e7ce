"""The contract between generation and runtime: backend, token streams, model cards, recovery events."""
