"""Benchmarks: Gaps after faults, and output equality."""
