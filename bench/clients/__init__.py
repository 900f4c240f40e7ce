"""Benchmarks of the clients and of the command line."""
