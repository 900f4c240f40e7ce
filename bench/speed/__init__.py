"""Benchmarks: Throughput and per-token cost."""
