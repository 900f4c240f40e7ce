"""Benchmarks of the Python library."""
