"""Benchmarks: Cost and balance of route choice."""
