"""Benchmarks: spans of a model against Hugging Face and against each other."""
