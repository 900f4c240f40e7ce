"""Benchmarks: The operator, and kills on a real cluster."""
