"""Benchmarks: gaps after faults, and output equality."""
