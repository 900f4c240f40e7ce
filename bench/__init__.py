"""Benchmarks: `make bench` runs all, `make bench ONLY=two_spans_1` runs one. Never part of the tests."""
