"""Benchmarks of the Python library and of the command line's batches."""
