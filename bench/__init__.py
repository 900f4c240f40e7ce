"""Benchmarks: `make bench`, or one of them: `make bench ONLY=two_spans_1`. Never part of the tests."""
