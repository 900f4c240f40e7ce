"""The contract between generation and runtime."""
